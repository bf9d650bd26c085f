"""Training examples of a selector in files: questions as a frozen model reads them, its answers, and signals of tokens."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...accelerate import accelerated
from ...accelerate.positions import check_positions
from ...core.files import write_whole
from ...core.layout import Layout
from ...core.masks import leftmost, question
from ...errors import MmaccelError, UnsupportedError
from ...families import Family, family_of
from ...method import TokenBatch
from ...recipe import Recipe, Stage
from ...runtime.tower.feature_cache import Remembered
from ..evaluate import Batch, Question, answer_lengths, batches, inputs_of, memory_error
from ..resume import check_settings, without_unusable

#: keeps every token, and gives the layout
_ALL = Recipe("all", (Stage("uniform", 1.0),))
#: weight of every visual key for ``effect``: at full weight no single key would make a difference
_DIMMED = 0.1

Target = Literal["answers", "effect", "attention"]


@dataclass(frozen=True)
class Read:
    """Inputs of the language model for questions with their answers: ``B`` rows of ``S`` positions.

    embeds : ``[B, S, D]``. positions : ``[..., B, S]`` long. real_token : ``[B, S]`` bool, what is no padding.
    visual : ``[B, S]`` bool. asked : ``[B, S]`` bool, the text behind the last picture of the prompt.
    layers : of DeepStack models, ``[levels, B, S, D]`` that the first layers add, zero for text; else ``[0]``.
    shown : ``[B, S, D]``, what a method is shown, where these make more of it than ``embeds``; else ``[0]``.
    """

    embeds: Tensor
    positions: Tensor
    real_token: Tensor
    visual: Tensor
    asked: Tensor
    layers: Tensor
    shown: Tensor

    def at(self, places: Tensor) -> Read:
        """Only the places ``[B, k]``; -1 is padding."""
        rows, at, real = torch.arange(len(places), device=places.device)[:, None], places.clamp(min=0), places >= 0
        taken = at if self.positions.dim() == 2 else at.expand(*self.positions.shape[:-2], -1, -1)
        return Read(
            self.embeds[rows, at] * real[..., None],
            self.positions.gather(-1, taken),
            self.real_token[rows, at] & real,
            self.visual[rows, at] & real,
            self.asked[rows, at] & real,
            self.layers[:, rows, at] if self.layers.numel() else self.layers,
            self.shown[rows, at] if self.shown.numel() else self.shown,
        )


@dataclass(frozen=True)
class Example:
    """A batch of questions in one file.

    read : prompts and answers.
    row, places, cells, grid : the ``N`` pictures and clips, as in :class:`~mmaccel.core.layout.Units`: the row of each, where
        its tokens are in it (``[N, n]``, -1 for padding), their cells and the grid.
    tokens, lengths : ``[B, T]`` and ``[B]`` long, the answers.
    start : the place that the first of their tokens is predicted from.
    states : ``[B, T, D]``, the last hidden states that they are predicted from.
    signals : ``[N, signals, n]`` float32, not negative, what speaks for each token, see :class:`Frozen`.
    """

    read: Read
    row: Tensor
    places: Tensor
    cells: Tensor
    grid: Tensor
    tokens: Tensor
    lengths: Tensor
    start: int
    states: Tensor
    signals: Tensor

    @property
    def valid(self) -> Tensor:
        """``[N, n]`` bool, False for padding."""
        return self.places >= 0

    def shown(self) -> TokenBatch:
        """The input of the selector, the same as in use."""
        words, asked_valid = leftmost(self.read.asked)
        at, seen = self.places.clamp(min=0), self.read.shown if self.read.shown.numel() else self.read.embeds
        features = seen[self.row[:, None], at] * self.valid[..., None]
        asked = seen[torch.arange(len(words), device=words.device)[:, None], words]
        return TokenBatch(
            features=features,
            valid=self.valid,
            cells=self.cells,
            grid=self.grid,
            segment=torch.zeros_like(self.places),
            question=asked[self.row],
            question_valid=asked_valid[self.row],
        )

    def narrowed(self, kept: Tensor, residual: Tensor | None = None) -> Read:
        """Inputs with only the tokens ``kept [N, n]`` of the pictures, padded on the left, to which ``residual [N, n, D]`` is
        added."""
        read, onto = self.read, (self.row[:, None].expand_as(kept)[kept], self.places[kept])
        if residual is not None:
            values = read.embeds[onto] + residual[kept].to(read.embeds.dtype)
            read = replace(read, embeds=read.embeds.index_put(onto, values))
        stays = torch.ones((), dtype=torch.bool, device=kept.device)
        stays_here = (read.real_token & ~read.visual).index_put(onto, stays)
        slots, held = leftmost(stays_here)
        width = slots.shape[1]
        shift = (torch.arange(width, device=slots.device) - (width - held.sum(1, keepdim=True))) % width
        return read.at(slots.masked_fill(~held, -1).gather(1, shift))

    def to(self, device: torch.device | str) -> Example:
        """On another device."""
        move: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **move, read=Read(*(x.to(device) for x in vars(self.read).values())))

    # --- files ------------------------------------------------------------------------------------------------
    def save(self, folder: Path, number: int, settings: Mapping[str, Any]) -> Path:
        """Write it whole as ``NUMBER-DIGEST.pt``; the digest covers its content, its number and the settings. Raises OSError
        if it cannot be written."""
        data = {**{f"read.{name}": x for name, x in vars(self.read).items()}, **vars(self)}
        data.pop("read")
        content = io.BytesIO()
        torch.save(data, content)
        held = content.getbuffer()
        path = folder / f"{number:05d}-{_digest(held, number, settings)}.pt"
        write_whole(path, held)
        return path

    @staticmethod
    def load(path: Path) -> Example:
        """Read it back, memory-mapped. Raises MmaccelError if it cannot be read."""
        try:
            data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            read = {name.removeprefix("read."): data.pop(name) for name in list(data) if name.startswith("read.")}
            return Example(Read(**read), **data)
        except Exception as error:
            raise _damaged(path) from error


def _digest(content: Any, number: int, settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(content)
    digest.update(json.dumps([number, settings]).encode())
    return digest.hexdigest()[:16]


def _damaged(path: Path) -> MmaccelError:
    return MmaccelError(f"{str(path)!r} is damaged, or of another training; delete it to make it again.")


class Frozen:
    """A frozen model: makes examples of prompts, and runs examples through the language model with gates.

    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare.
    target : signals of every token. ``effect``: the absolute derivative of the answer's log-probability by the weight of the
        token's keys, where all visual keys have a tenth of their weight. ``attention``: for every layer, the mean attention of
        question and answer to the token, of the head with the largest. ``answers``: none.
    """

    def __init__(self, model: Any, processor: Any, target: Target) -> None:
        self.model, self.processor = model, processor
        self.family: Family = family_of(model, processor)
        self.text, self.target = self.family.text, target

    # --- prompts ----------------------------------------------------------------------------------------------
    def example(self, batch: Batch, longest: int) -> Example:
        """Make an example: generate the answers, record inputs and states, and compute the signals."""
        inputs, memory = inputs_of(self.model, self.processor, batch), Remembered()
        check_positions(self.model, _ALL, inputs, longest)
        with torch.no_grad():
            with memory.on(self.family):
                written = self.model.generate(**inputs, max_new_tokens=longest, do_sample=False, num_beams=1)
                width = inputs["input_ids"].shape[1]
                tokens = written[:, width:]
                given, layout, states = self._given(inputs, tokens[:, :-1])
            example = replace(
                self._laid_out(given, layout, width),
                tokens=tokens,
                lengths=answer_lengths(tokens, self.model.generation_config.eos_token_id),
                states=states[:, width - 1 : width - 1 + tokens.shape[1]],
            )
        if self.target == "answers":
            signals = example.places[:, None][:, :0].float()
        else:
            signals = self.effect(example)[:, None] if self.target == "effect" else self.attention(example)
        return replace(example, signals=signals).to("cpu")

    def effect(self, example: Example) -> Tensor:
        """``[N, n]``, see the class; text keeps the weight of its keys."""
        gates = torch.where(example.read.visual, _DIMMED, 1.0).requires_grad_()
        with self.still():
            said = self.logits(self.states(example, example.read, gates.log())).log_softmax(-1)
            steps = torch.arange(said.shape[1], device=said.device) < example.lengths[:, None]
            answer = (said.gather(-1, example.tokens[..., None])[..., 0] * steps).sum()
            (slope,) = torch.autograd.grad(answer, gates)
        return self._of_pictures(example, slope.abs() * _DIMMED)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Let gradients pass through the model without computing those of its weights."""
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in trained:
                weight.requires_grad_()

    @torch.no_grad()
    def attention(self, example: Example) -> Tensor:
        """``[N, layers, n]``, see the class."""
        paid: list[Tensor] = []
        before = self.text.config._attn_implementation
        # other implementations do not return weights
        self.text.set_attn_implementation("eager")
        hooks = [
            layer.register_forward_hook(lambda _, __, out: paid.append(self._paid(example, out[1])))
            for layer in map(self.family.attention_in, self.family.attending)
        ]
        try:
            self.states(example, example.read)
        finally:
            for hook in hooks:
                hook.remove()
            self.text.set_attn_implementation(before)
        return torch.stack(paid, dim=1)

    def _given(self, inputs: Mapping[str, Any], answer: Tensor) -> tuple[dict[str, Any], Layout, Tensor]:
        """Arguments of the text model for prompt and answer, the layout, and the last hidden states."""
        whole = dict(inputs)
        types = (("mm_token_type_ids", 0), ("moe_mm_token_type_ids", 0))
        for name, filler in (("input_ids", answer), ("attention_mask", 1), *types):
            if name in whole:
                more = filler if isinstance(filler, Tensor) else torch.full_like(answer, filler)
                whole[name] = torch.cat([whole[name], more], dim=1)
        seen: list[dict[str, Any]] = []
        note = self.text.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(dict(kwargs)), with_kwargs=True, prepend=True
        )
        try:
            with accelerated(self.model, _ALL, processor=self.processor):
                states = self.family.inner(**whole, use_cache=False).last_hidden_state
                layout = self.model.mmaccel.layout
        finally:
            note.remove()
        given = seen[0]
        given["real_token"] = whole["attention_mask"].bool()
        return given, layout, states

    def _laid_out(self, given: Mapping[str, Any], layout: Layout, width: int) -> Example:
        embeds, real_token = given["inputs_embeds"], given["real_token"]
        count, length = real_token.shape
        visual = pad(layout.visual, (0, length - layout.visual.shape[1])).to(embeds.device)
        places = torch.arange(length, device=embeds.device)
        prompt = real_token & (places < width)
        asked = question(prompt & ~visual, visual & prompt)
        positions = given.get("position_ids")
        positions = (
            places.expand(count, -1) if positions is None else positions.expand(*positions.shape[:-2], count, -1)
        )
        units = layout.units("picture")
        nothing, layers = embeds.new_zeros(0), _layers(self.family, given, embeds)
        shown = self.family.entering(embeds, list(layers)) if layers.numel() else embeds
        return Example(
            Read(embeds, positions, real_token, visual, asked, layers, nothing if shown is embeds else shown),
            row=units.row.to(embeds.device),
            places=units.places.to(embeds.device),
            cells=units.cells.to(embeds.device),
            grid=units.grid.to(embeds.device),
            tokens=nothing,
            lengths=nothing,
            start=width - 1,
            states=nothing,
            signals=nothing,
        )

    def _paid(self, example: Example, weights: Tensor) -> Tensor:
        """``[N, n]``: mean attention of question and answer to the tokens of pictures, of the head with the largest, from
        ``weights [B, H, S, S]``."""
        steps = torch.arange(weights.shape[2], device=weights.device)
        answer = (steps >= example.start) & (steps < (example.start + example.lengths)[:, None])
        asking = (example.read.asked | answer).to(weights)
        asking = asking / asking.sum(1, keepdim=True)
        return self._of_pictures(example, torch.einsum("bhqk,bq->bhk", weights, asking).amax(1).float())

    def _of_pictures(self, example: Example, figures: Tensor) -> Tensor:
        """``figures [B, S]`` of the tokens of every picture, ``[N, n]``."""
        return figures[example.row[:, None], example.places.clamp(min=0)] * example.valid

    # --- once more --------------------------------------------------------------------------------------------
    def states(self, example: Example, read: Read, gates: Tensor | None = None) -> Tensor:
        """The last hidden states ``[B, T, D]`` that the answers are predicted from, differentiable in ``gates`` and ``read``.

        read : the example's, or a part of its places with all text behind the pictures.
        gates : ``[B, S]``, what is added to the logit of every key in every layer and head.
        """
        count, length = read.real_token.shape
        visible = (
            torch.ones(length, length, dtype=torch.bool, device=read.real_token.device).tril()
            & read.real_token[:, None]
        )
        visible = visible | torch.eye(length, dtype=torch.bool, device=visible.device)
        mask = torch.zeros(visible.shape, dtype=read.embeds.dtype, device=visible.device)
        if gates is not None:
            mask = mask + gates[:, None].to(mask)
        mask = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[:, None]
        extra: dict[str, Any] = {}
        if read.layers.numel():
            extra = self.family.deep_arguments(read.visual, [x[read.visual] for x in read.layers])
        out = self.text(
            inputs_embeds=read.embeds.clone(),
            attention_mask=mask,
            position_ids=read.positions,
            use_cache=False,
            **extra,
        ).last_hidden_state
        steps = example.tokens.shape[1]
        # the answer is at the end
        before = length - (example.read.real_token.shape[1] - example.start)
        return out[:, before : before + steps]

    def logits(self, states: Tensor) -> Tensor:
        """``[..., V]`` of hidden states, float32."""
        return self.family.logits(states).float()


def _layers(family: Family, given: Mapping[str, Any], embeds: Tensor) -> Tensor:
    """DeepStack features as in :class:`Read`."""
    added = family.deep_features(given)
    if added is None:
        return embeds.new_zeros(0)
    mask, features = added
    mask = mask[..., 0] if mask.dim() == 3 else mask
    layers = embeds.new_zeros(len(features), *embeds.shape)
    for level, values in enumerate(features):
        layers[level][mask] = values.to(embeds)
    return layers


# ------------------------------------------------------------------------------------------------------------- the cache


def cached(
    frozen: Frozen,
    questions: Sequence[Question],
    folder: Path,
    settings: Mapping[str, Any],
    *,
    batch_size: int,
    longest: int,
    complain: Callable[[str], None] | None,
    progress: Callable[[int, int], None],
) -> list[Path]:
    """The files of all examples; missing ones are made. Raises MmaccelError if the folder belongs to a run with other settings,
    a file in it is damaged (the message names it), or no question can be used.

    folder : of the files; ``settings.json`` in it holds the settings.
    settings : everything that examples depend on, as plain data.
    complain : called with a sentence for every question that cannot be used and is left out; without it that is an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note, plain = folder / "settings.json", json.loads(json.dumps(settings))
    _check_note(note, plain)
    earlier: dict[str, Path] = {}
    for path in sorted(folder.glob("*.pt")):
        at = path.name.partition("-")[0]
        if at in earlier:
            raise _damaged(path)
        earlier[at] = path
    paths: list[Path] = []
    asked = 0

    def make(batch: Batch) -> Example:
        return frozen.example(batch, longest)

    try:
        with memory_error("give a smaller --batch-size, or smaller pictures"):
            for number, batch in enumerate(batches(questions, batch_size, complain)):
                held = earlier.get(f"{number:05d}")
                if held is None:
                    example = without_unusable(batch, make, complain)[1]
                    if example is not None:
                        paths.append(example.save(folder, number, plain))
                elif not held.is_file() or held.stem.partition("-")[2] != _digest(held.read_bytes(), number, plain):
                    raise _damaged(held)
                else:
                    paths.append(held)
                asked += len(batch)
                progress(asked, len(questions))
    except UnsupportedError as error:
        raise MmaccelError(f"Examples cannot be made with this model: {error}") from error
    if not paths:
        raise MmaccelError(f"None of {len(questions)} {folder.name} questions can be used; give others.")
    return paths


def _check_note(note: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings if there are none, or raise MmaccelError if they differ."""
    remedy = f"delete the folder {str(note.parent)!r}, or give another one with --out (out=)"
    if not note.exists():
        write_whole(note, json.dumps(settings, indent=1).encode() + b"\n")
        return
    try:
        before = json.loads(note.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise TypeError("no object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise MmaccelError(f"{str(note)!r} cannot be read, or is damaged; {remedy}.") from error
    check_settings(note, before, settings, remedy)
