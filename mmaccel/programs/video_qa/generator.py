"""Answers of one model to prompts with videos: by ``generate``, or from a shared prefill of the video."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...accelerate import Accelerator, accelerated
from ...accelerate.positions import check_positions
from ...core.transformers_api import DynamicCache, cache_argument
from ...families import family_of
from ...kv.cache import CacheState, adopt, cache_with
from ...kv.positions import NextPositions
from ...media import files
from ...media.files import Prompt
from ...media.prepare import prepare
from ...method import FramesMethod, PatchMethod, ProjectorMethod
from ...method.model_options import KeepLoaded
from ...recipe import Recipe, get_recipe
from ...video.clip import Clip
from ..drafts import DraftArguments, drafting_sums, readings
from .clip_caches import ClipCaches
from .questions import VideoQuestion

Record = dict[str, Any]

#: inputs that have an entry for every token of the prompt
_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass
class Figures:
    """Sums over answers; those of several workers can be added.

    questions, failed : answered questions, and those that ended in an error.
    videos : decoded videos.
    prefills : prefills of videos, fewer than questions if one prefill serves several.
    visual_tokens, visual_tokens_kept : visual tokens of every question, and those of them that reach the last layer.
    kv_bytes : of the cache at the end of the answers, padding of batches included.
    seconds : ``waiting`` for frames, ``choosing`` among them, ``processor``, and ``model``; of the model's, also
        ``encoder``, ``selection``, ``prefill`` and ``decode``.
    drafting : of answers with drafts, the sums of :data:`mmaccel.core.figures.DRAFT_SUMS`.
    read_again : answers that a fallback read again; the tokens of all readings count as kept.
    notes : remarks in words.
    """

    questions: int = 0
    failed: int = 0
    videos: int = 0
    prefills: int = 0
    visual_tokens: int = 0
    visual_tokens_kept: float = 0
    read_again: float = 0
    kv_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backends: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    drafting: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    notes: list[str] = field(default_factory=list)

    def __iadd__(self, other: Figures) -> Figures:
        for one in dataclasses.fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, dict):
                for key, value in theirs.items():
                    mine[key] = mine.get(key, 0) + value
            elif isinstance(mine, list):
                mine.extend(note for note in theirs if note not in mine)
            else:
                setattr(self, one.name, mine + theirs)
        return self

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    def note(self, sentence: str) -> None:
        """Add a note once."""
        if sentence not in self.notes:
            self.notes.append(sentence)


def needs_own_prefill(recipe: Recipe) -> str | None:
    """Reason why every question needs its own prefill with a recipe; None if one prefill of the video is enough.

    One is enough if nothing of the video depends on the question: with methods before the language model that do not look at
    the question. Methods inside it, cache policies and codecs see the question, or would make a difference to ``generate``.
    """
    for _, method in recipe.build():
        if getattr(method, "needs_question", False):
            return f"{method.name} looks at the question"
        if method.site != "encoder" and not isinstance(method, (FramesMethod, PatchMethod, ProjectorMethod)):
            return f"{method.name} works while the question is read"
    return "positions='paper' changes the positions before the question" if recipe.positions == "paper" else None


@dataclass(frozen=True)
class Shown:
    """A clip, and the numbers ``stay`` of the frames that the model sees; they are copied when it reads them."""

    clip: Clip
    stay: list[int]

    @property
    def indices(self) -> list[int]:
        """Their numbers in the video."""
        return [self.clip.indices[i] for i in self.stay]

    def cut(self) -> Clip:
        """The clip with these frames."""
        if self.stay == list(range(len(self.clip.frames))):
            return self.clip
        frames, times = self.clip.frames[self.stay], self.clip.timestamps[self.stay]
        return dataclasses.replace(self.clip, frames=frames, indices=self.indices, timestamps=times)


Batch = list[tuple[list[VideoQuestion], Shown]]


@dataclass(frozen=True)
class Prefix:
    """A cache with the beginnings of ``V`` prompts up to the end of their videos.

    ids, mask : ``[V, P]``, padded on the left.
    follows : ``[1, V]``, with M-RoPE ``[3, V]``: the position of the first token after each.
    visual, kept : ``[V]``, visual tokens, and those of them that reach the last layer.
    behind : ``[V, T]``, the tokens after it in the prompt of the first question. first : ``[n]``, the same after another video.
    """

    state: CacheState
    ids: Tensor
    mask: Tensor
    follows: Tensor
    visual: Tensor
    kept: Tensor
    behind: Tensor
    first: Tensor


class AnswerGenerator:
    """A model with a recipe that answers batches of questions about videos; ``figures`` are added up.

    drafts : arguments ``lossless``, ``draft``, ``lookup`` and ``fallback`` of ``accelerate_vlm``.

    Raises MmaccelError if the model cannot honour the recipe or the drafts.
    """

    def __init__(
        self, model: Any, processor: Any, recipe: Recipe, max_new_tokens: int, drafts: DraftArguments | None = None
    ) -> None:
        self.model, self.processor, self.recipe, self.max_new_tokens = model, processor, recipe, max_new_tokens
        self.drafts = drafts or {}
        self.figures = Figures()
        lossless = bool(self.drafts.get("lossless"))
        # what the processor would drop, a model that answers as the full one does must see
        self.prepared = processor if lossless else prepare(processor, recipe)
        #: the recipe that shapes answers
        self.shaping = get_recipe("none") if lossless else recipe
        #: keeps draft models and text towers of the recipe, and what drafts have learned
        self._loaded = KeepLoaded()
        with accelerated(model, recipe, processor=self.prepared, **self.drafts):
            pass  # reports what the model does not support before the long run
        self.family = family_of(model, processor)
        self.base: Any = self.family.model
        self.own_prefill = (
            "drafts and a fallback begin with the whole prompt" if self.drafts else needs_own_prefill(recipe)
        )
        if self.family.stateful and not recipe.stages:
            # with a recipe mmaccel runs such layers row by row
            self.own_prefill = "layers with a state would read padding after a video as text"

    def encode(self, processor: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Inputs of the model, on its device."""
        with self.figures.measure("processor"):
            return dict(files.encode(processor, prompts).to(self.model.device, self.model.dtype))

    def generate(self, chunk: Sequence[tuple[VideoQuestion, int]], clips: Sequence[Shown]) -> list[str]:
        """Answers by one call of ``generate`` on the whole prompts."""
        recipe, processor = self.recipe, self.prepared
        asking = [
            m for _, m in self.shaping.build() if isinstance(m, FramesMethod) and getattr(m, "needs_question", False)
        ]
        if asking and not getattr(asking[0], "query", ""):
            if len(chunk) > 1:
                return [self.generate([pair], [clip])[0] for pair, clip in zip(chunk, clips, strict=True)]
            recipe = recipe.override(query=chunk[0][0].question)
            processor = prepare(self.processor, recipe)
        prompts = [Prompt(one.words(), clip=clip.cut()) for (one, _), clip in zip(chunk, clips, strict=True)]
        inputs = self.encode(processor, prompts)
        self.figures.prefills += len(chunk)
        with self._working(recipe, processor):
            answers = self._written(inputs)
            stats = self.model.mmaccel.stats()
        self._count(stats)
        self.figures.visual_tokens += stats["visual_tokens"]
        again = readings(stats)
        self.figures.visual_tokens_kept += again.get("visual_tokens_kept", stats["visual_tokens_kept"])
        self.figures.read_again += again.get("read_again", 0)
        self.figures.kv_bytes += stats["kv_bytes"]
        return answers

    def read(self, batch: Batch, caches: ClipCaches | None = None) -> Prefix:
        """The prefill of the videos of a batch; with ``caches`` of one video, which may be kept there."""
        if caches is None:
            return self._prefill(batch)
        (about,) = (clip.cut() for _, clip in batch)
        if (found := caches.find(about)) is not None:
            return Prefix(**found)
        prefix = self._prefill(batch)
        caches.keep(about, vars(prefix))
        return prefix

    def _prefill(self, batch: Batch) -> Prefix:
        """One prefill of the videos of a batch: their prompts up to the last visual token and any marks after it that do not
        have positions of text."""
        first = batch[0][0][0].words()
        inputs = self.encode(self.prepared, [Prompt(first, clip=clip.cut()) for _, clip in batch])
        check_positions(self.base, self.recipe, inputs, self.max_new_tokens)
        self.figures.prefills += len(batch)
        ids, family, model = inputs["input_ids"], self.family, self.base
        visual = family.visual(ids)
        # all rows are padded on the left and end with the same question
        end = int(visual.any(0).nonzero().max()) + 1
        cache = DynamicCache()
        state = adopt(cache, family.depth, None, family.recurrent, family.latent)
        with self._working(self.recipe, self.prepared):
            positions = model._prepare_position_ids_for_generation(ids, dict(inputs))
            positions = positions[-3:] if positions.dim() == 3 else positions
            apart = (positions.diff() != 1).flatten(0, -2).any(0).nonzero()
            end = max([end, *(int(last) + 1 for last in apart[-1:])])
            feed = {name: value[:, :end] if name in _PER_TOKEN else value for name, value in inputs.items()}
            family.inner(**feed, position_ids=positions[..., :end], use_cache=True, **cache_argument(cache))
            handle: Accelerator = model.mmaccel
            kept = visual if handle.reduction is None else visual[:, :end] & handle.reduction.kept.to(visual.device)
        self._count(handle.stats())
        follows = positions.reshape(-1, *positions.shape[-2:])[:, :, end]
        return Prefix(
            state,
            feed["input_ids"],
            feed["attention_mask"],
            follows,
            visual.sum(1),
            kept.sum(1),
            ids[:, end:],
            self._question(batch[0][0][0]),
        )

    def resume(self, prefix: Prefix, chunk: Sequence[tuple[VideoQuestion, int]]) -> list[str]:
        """Answers to questions after videos in the cache, which stays as it is; questions about one video share its keys."""
        rows = torch.tensor([at for _, at in chunk], device=prefix.ids.device)
        tails = [self._tail(prefix, at, one) for one, at in chunk]
        width = max(map(len, tails))
        new = torch.full((len(tails), width), self.processor.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(new)
        for row, tail in enumerate(tails):
            new[row, width - len(tail) :] = tail
            mask[row, width - len(tail) :] = 1
        new, mask = new.to(prefix.ids), mask.to(prefix.mask)
        begin = prefix.follows[:, rows]
        text = (begin[..., None] + mask.cumsum(1) - 1).clamp(min=0)
        positions = torch.cat([text.new_zeros(*text.shape[:-1], prefix.ids.shape[1]), text], dim=-1)
        inputs = {
            "input_ids": torch.cat([prefix.ids[rows], new], dim=1),
            "attention_mask": torch.cat([prefix.mask[rows], mask], dim=1),
            "position_ids": positions[0] if len(positions) == 1 else positions,
        }
        with self._working(self.recipe, self.prepared):
            # the bare model cannot read what rows share
            state = prefix.state.selected(rows, share=self.model.mmaccel.plan.active)
            if (offset := state.positions.offset) is not None:
                # with M-RoPE the position of a question may be before that of the last frame
                state.positions = NextPositions(state.seen - begin[0].to(offset))
            answers = self._written(inputs, **cache_argument(cache_with(state)))
            stats = self.model.mmaccel.stats()
        self._count(stats)
        self.figures.kv_bytes += stats["kv_bytes"]
        return answers

    def _tail(self, prefix: Prefix, row: int, one: VideoQuestion) -> Tensor:
        """``[n]``: the tokens after the video of a row in a prompt with this question. Tokens that depend on the video, such as
        times, come from the prompt of the first question."""
        behind, first, mine = prefix.behind[row].to("cpu"), prefix.first, self._question(one)
        most = min(len(behind), len(first))
        differ = (behind.flip(0)[:most] != first.flip(0)[:most]).nonzero()
        same = int(differ[0]) if len(differ) else most
        return torch.cat([behind[: len(behind) - same], mine[len(first) - same :]])

    def _question(self, one: VideoQuestion) -> Tensor:
        """``[n]``: the tokens after the visual ones in a prompt with this question and a blank video."""
        blank = Clip(np.zeros((2, 64, 64, 3), np.uint8), [0, 1], 2, 1.0)
        with self.figures.measure("processor"):
            ids: Tensor = files.encode(self.processor, [Prompt(one.words(), clip=blank)])["input_ids"][0]
        return ids[int(self.family.visual(ids).nonzero().max()) + 1 :]

    def _written(self, inputs: Mapping[str, Any], **options: Any) -> list[str]:
        """Greedy answers of ``generate`` to prompts."""
        check_positions(self.base, self.shaping, inputs, self.max_new_tokens)
        out = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False, num_beams=1, **options)
        texts = self.processor.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]

    @contextmanager
    def _working(self, recipe: Recipe, processor: Any) -> Iterator[None]:
        with (
            self.figures.measure("model"),
            torch.inference_mode(),
            accelerated(self.model, recipe, processor=processor, **self.drafts),
        ):
            yield

    def _count(self, stats: Record) -> None:
        for name, seconds in stats["seconds"].items():
            self.figures.seconds[name] += seconds
        for name, value in drafting_sums(stats).items():
            self.figures.drafting[name] += value
        for note in stats["notes"]:
            self.figures.note(note)
