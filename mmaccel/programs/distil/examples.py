"""What a selector learns from: questions as a frozen model reads them, its answers, and which tokens they hang on; on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...accelerate import accelerated
from ...core.layout import Layout
from ...core.masks import leftmost, question
from ...errors import MmaccelError, UnsupportedError
from ...families import Family, family_of
from ...method import TokenBatch
from ...recipe import Recipe, Stage
from ...runtime.remembered import Remembered
from ..evaluate import Batch, Question, answer_lengths, batches, inputs_of

#: keeps every token; what is asked of it is the layout
_ALL = Recipe("all", (Stage("uniform", 1.0),))
#: what is left of the weight of every visual key where the effect of each is looked for: among all others at their full
#: weight no single one would be missed
_DIMMED = 0.1

Target = Literal["answers", "effect", "attention"]


@dataclass(frozen=True)
class Read:
    """Questions with their answers, as the language model is given them: ``B`` rows of ``S`` places, prompt and answer.

    embeds : ``[B, S, D]``. positions : ``[..., B, S]`` long. there : ``[B, S]`` bool, what is no padding.
    visual : ``[B, S]`` bool. asked : ``[B, S]`` bool, the text behind the last picture of the prompt.
    layers : of DeepStack models, ``[levels, B, S, D]`` that the first layers add, zero for text; else ``[0]``.
    shown : ``[B, S, D]``, what a method is shown, where these make more of it than ``embeds``; else ``[0]``.
    """

    embeds: Tensor
    positions: Tensor
    there: Tensor
    visual: Tensor
    asked: Tensor
    layers: Tensor
    shown: Tensor

    def at(self, places: Tensor) -> Read:
        """The places ``[B, k]`` alone; -1 stands for padding."""
        rows, at, real = torch.arange(len(places), device=places.device)[:, None], places.clamp(min=0), places >= 0
        taken = at if self.positions.dim() == 2 else at.expand(*self.positions.shape[:-2], -1, -1)
        return Read(
            self.embeds[rows, at] * real[..., None],
            self.positions.gather(-1, taken),
            self.there[rows, at] & real,
            self.visual[rows, at] & real,
            self.asked[rows, at] & real,
            self.layers[:, rows, at] if self.layers.numel() else self.layers,
            self.shown[rows, at] if self.shown.numel() else self.shown,
        )


@dataclass(frozen=True)
class Example:
    """A batch of questions that is trained on together, from one file of the cache.

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
        """What a selector sees of it: the same as when it works."""
        words, there = leftmost(self.read.asked)
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
            question_valid=there[self.row],
        )

    def narrowed(self, kept: Tensor, residual: Tensor | None = None) -> Read:
        """What the language model reads when of the pictures only ``kept [N, n]`` stay, padded on the left, ``residual
        [N, n, D]`` added to each of these."""
        read, onto = self.read, (self.row[:, None].expand_as(kept)[kept], self.places[kept])
        if residual is not None:
            values = read.embeds[onto] + residual[kept].to(read.embeds.dtype)
            read = replace(read, embeds=read.embeds.index_put(onto, values))
        stays = torch.ones((), dtype=torch.bool, device=kept.device)
        here = (read.there & ~read.visual).index_put(onto, stays)
        slots, held = leftmost(here)
        width = slots.shape[1]
        shift = (torch.arange(width, device=slots.device) - (width - held.sum(1, keepdim=True))) % width
        return read.at(slots.masked_fill(~held, -1).gather(1, shift))

    def to(self, device: torch.device | str) -> Example:
        """On another device."""
        move: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **move, read=Read(*(x.to(device) for x in vars(self.read).values())))

    # --- files ------------------------------------------------------------------------------------------------
    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        data = {**{f"read.{name}": x for name, x in vars(self.read).items()}, **vars(self)}
        data.pop("read")
        draft = path.with_suffix(".part")
        torch.save(data, draft)
        os.replace(draft, path)

    @staticmethod
    def load(path: Path) -> Example:
        """Read it back; what is not looked at is not read."""
        data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        read = {name.removeprefix("read."): data.pop(name) for name in list(data) if name.startswith("read.")}
        return Example(Read(**read), **data)


class Frozen:
    """A model that is only read: prompts into examples, and examples through the language model once more, with gates.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare.
    target : what is noted of every token. ``effect``: how much the logarithm of the answer's probability moves with the
        weight of the token's keys, for or against, in a picture whose keys have all lost nine tenths of theirs. ``attention``:
        a signal for every layer, what the token is paid by question and answer, mean over these, the most of all heads.
        ``answers``: nothing.
    """

    def __init__(self, model: Any, processor: Any, target: Target) -> None:
        self.model, self.processor = model, processor
        self.family: Family = family_of(model, processor)
        self.text, self.target = self.family.text, target

    # --- prompts ----------------------------------------------------------------------------------------------
    def example(self, batch: Batch, longest: int) -> Example:
        """Ask the model, and note what it read and wrote, and what its answer hangs on."""
        inputs, memory = inputs_of(self.model, self.processor, batch), Remembered()
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
        """Gradients go through the model, and none is kept for its weights, which nobody wants."""
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
        # weights can be seen in this one alone
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
        """What the text model is called with for prompt and answer, where the pictures are, and its last hidden states."""
        whole = dict(inputs)
        for name, filler in (("input_ids", answer), ("attention_mask", 1), ("mm_token_type_ids", 0)):
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
        given["there"] = whole["attention_mask"].bool()
        return given, layout, states

    def _laid_out(self, given: Mapping[str, Any], layout: Layout, width: int) -> Example:
        embeds, there = given["inputs_embeds"], given["there"]
        count, length = there.shape
        visual = pad(layout.visual, (0, length - layout.visual.shape[1])).to(embeds.device)
        places = torch.arange(length, device=embeds.device)
        prompt = there & (places < width)
        asked = question(prompt & ~visual, visual & prompt)
        positions = given.get("position_ids")
        positions = (
            places.expand(count, -1) if positions is None else positions.expand(*positions.shape[:-2], count, -1)
        )
        units = layout.units("picture")
        nothing, layers = embeds.new_zeros(0), _layers(self.family, given, embeds)
        shown = self.family.entering(embeds, list(layers)) if layers.numel() else embeds
        return Example(
            Read(embeds, positions, there, visual, asked, layers, nothing if shown is embeds else shown),
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
        """``[N, n]``: what the tokens of pictures are paid by question and answer, mean over these, the most of all heads;
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
        """The last hidden states ``[B, T, D]`` that the answers are predicted from, differentiable in ``gates`` and in what is
        read.

        Parameters
        ----------
        read : the example's, or a part of its places with all text behind the pictures.
        gates : ``[B, S]``, what is added to the logit of every key in every layer and head.
        """
        count, length = read.there.shape
        visible = torch.ones(length, length, dtype=torch.bool, device=read.there.device).tril() & read.there[:, None]
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
        # the answer is at the end, whatever was left out before it
        before = length - (example.read.there.shape[1] - example.start)
        return out[:, before : before + steps]

    def logits(self, states: Tensor) -> Tensor:
        """``[..., V]`` of hidden states, float32."""
        return self.family.logits(states).float()


def _layers(family: Family, given: Mapping[str, Any], embeds: Tensor) -> Tensor:
    """What layers add, as in :class:`Read`."""
    added = family.deep_features(given)
    if added is None:
        return embeds.new_zeros(0)
    mask, features = added
    mask = mask[..., 0] if mask.dim() == 3 else mask
    found = embeds.new_zeros(len(features), *embeds.shape)
    for level, values in enumerate(features):
        found[level][mask] = values.to(embeds)
    return found


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
    """The files of all examples, of which those that are missing are made.

    Raises
    ------
    MmaccelError
        If the folder holds examples of another model or other questions, or a question cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note, plain = folder / "settings.json", json.loads(json.dumps(settings))
    if note.is_file():
        before = json.loads(note.read_text(encoding="utf-8"))
        if differ := [name for name in plain if before.get(name) != plain[name]]:
            raise MmaccelError(
                f"{str(folder)!r} holds examples with another {' and another '.join(differ)}; give another folder, or "
                "delete it."
            )
    else:
        note.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    found: list[Path] = []
    asked = 0
    try:
        for number, batch in enumerate(batches(questions, batch_size, complain)):
            path = folder / f"{number:05d}.pt"
            if not path.is_file():
                frozen.example(batch, longest).save(path)
            found.append(path)
            asked += len(batch)
            progress(asked, len(questions))
    except torch.OutOfMemoryError as error:
        raise MmaccelError("The device ran out of memory; give a smaller --batch-size, or smaller pictures.") from error
    except UnsupportedError as error:
        raise MmaccelError(f"Examples cannot be made with this model: {error}") from error
    return found


__all__ = ["Example", "Frozen", "Read", "Target", "cached"]
