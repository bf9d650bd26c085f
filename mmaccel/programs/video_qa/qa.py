"""Bulk video question answering: the next videos are decoded while the model answers.

>>> from mmaccel.programs.video_qa.qa import answer_videos
>>> for record in answer_videos("questions.jsonl", model, processor, recipe="holitom", retain=0.15):
...     print(record["id"], record.get("answer", record.get("error")))

Several questions of one video are answered from one prefill where the recipe allows it: the beginning of the prompt, up to the
video, is read once, and every question continues from that cache, which is restored afterwards.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...accelerate import Accelerator, accelerated
from ...accelerate.positions import check_positions
from ...core.transformers_api import DynamicCache, cache_argument
from ...errors import MmaccelError
from ...families import family_of
from ...families.load import load_model
from ...kv.cache import CacheState, adopt
from ...media.files import Prompt, encode
from ...media.prepare import prepare
from ...method import EncoderMethod, FrameChoice, FramesMethod, PatchMethod, ProjectorMethod, ReuseMethod
from ...method.model_options import KeepLoaded
from ...method.registry import methods
from ...recipe import Recipe, RecipeLike, Stage, get_recipe
from ...video.clip import Clip
from ...video.decode_spec import GIB, DecodeSpec, Select, check_timeout
from ...video.prefetch import Ahead, begin
from ..evaluate import fingerprint, sentence
from ..identity import digests, recipe_parts, versions
from .questions import VideoQuestion, as_questions, by_video

Record = dict[str, Any]

#: questions at a time that ``auto`` begins with
_AUTO = 8
#: a method that chooses frames chooses from so many times as many
_DENSER = 4
#: inputs that have an entry for every token of the prompt
_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")


@dataclass(frozen=True)
class QASettings:
    """Settings of a run, as plain data that can be sent to another process.

    Parameters
    ----------
    model : a folder or a hub id.
    recipe : of the model.
    frames : frames of a video that the model sees, or all of a shorter one.
    frame_method : ``uniform``, evenly spaced; ``keyframes``, those of the container first; or a method of site ``frames``
        that chooses, such as ``scene-frames``, out of four times as many evenly spaced ones.
    frame_options : options of that method.
    max_new_tokens : longest answer. Answers are greedy.
    batch_size : questions at a time; ``auto`` begins with 8 and halves when memory does not suffice.
    device, dtype, attn, trust_remote_code : as for :func:`mmaccel.families.load.load_model`.
    timeout : seconds that decoding a video may take.
    memory : limit of the decoded frames that are held at a time, in bytes; a video that takes more alone fails. Where little
        fits, fewer questions are answered together.

    Raises
    ------
    MmaccelError
        If a value is not allowed.
    """

    model: str
    recipe: Recipe
    frames: int = 16
    frame_method: str = "uniform"
    frame_options: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 64
    batch_size: int | Literal["auto"] = "auto"
    device: str | None = None
    dtype: str = "auto"
    attn: str | None = None
    trust_remote_code: bool = False
    timeout: float = 120.0
    memory: int = 4 * GIB

    def __post_init__(self) -> None:
        self.recipe.build()
        self.chooser()
        for name in ("frames", "max_new_tokens", "memory", "batch_size"):
            value = getattr(self, name)
            if (name, value) != ("batch_size", "auto") and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise MmaccelError(f"{name} must be a whole number of at least 1, got {value!r}.")
        check_timeout(self.timeout)
        self.decode_spec()

    def decode_spec(self) -> DecodeSpec:
        """Which frames of a video are decoded."""
        denser = 1 if self.chooser() is None else _DENSER
        select: Select = "keyframes" if self.frame_method == "keyframes" else "uniform"
        return DecodeSpec(self.frames * denser, select=select, threads=1, memory=self.memory)

    def chooser(self) -> FrameChoice | None:
        """The method that chooses frames, if ``frame_method`` is one."""
        if self.frame_method in ("uniform", "keyframes"):
            return None
        choosing = [name for name, found in methods().items() if issubclass(found, FrameChoice)]
        if self.frame_method not in choosing:
            raise MmaccelError(
                f"frame_method must be uniform, keyframes, {', '.join(choosing)}, got {self.frame_method!r}."
            )
        built = self._choice().stages[0].build()
        assert isinstance(built, FrameChoice)
        return built

    @property
    def most(self) -> int:
        """Questions at a time at the beginning."""
        return _AUTO if self.batch_size == "auto" else self.batch_size

    def windows(self, questions: Iterable[VideoQuestion]) -> Iterator[list[list[VideoQuestion]]]:
        """Videos with their questions, as many as are decoded before batches are made of them. Only this decides which
        questions are answered together, in one process or in several."""
        window: list[list[VideoQuestion]] = []
        for group in by_video(questions):
            window.append(group)
            if sum(map(len, window)) >= 2 * self.most:
                yield window
                window = []
        if window:
            yield window

    def identity(self) -> Record:
        """What a run must have in common with an earlier one to resume it, see :class:`.answers.AnswerFile`. Raises
        MmaccelError if the files of the model cannot be read."""
        # the template of a question with choices
        asked = VideoQuestion("", question="...", choices=("...", "...")).words()
        return {
            # digests identify a folder, not its path
            "model": Path(self.model).resolve().name if Path(self.model).is_dir() else self.model,
            **digests(self.model),
            "dtype": self.dtype,
            "device": self.device.partition(":")[0] if self.device else "cuda" if torch.cuda.is_available() else "cpu",
            "attn": self.attn or "default",
            "trust_remote_code": self.trust_remote_code,
            "recipe": dataclasses.asdict(self.recipe),
            **_parts(self.recipe, self.model),
            "frames": self.frames,
            "frame_method": self.frame_method,
            "frame_options": dict(self.frame_options),
            **({} if self.chooser() is None else _parts(self._choice(), self.model)),
            "max_new_tokens": self.max_new_tokens,
            "prompt": asked,
            **versions(),
        }

    def _choice(self) -> Recipe:
        """The method that chooses frames, as a recipe."""
        return Recipe(f"frames by {self.frame_method}", (Stage(self.frame_method, 1.0, self.frame_options),))


def _parts(recipe: Recipe, model: str) -> dict[str, str]:
    """:func:`.identity.recipe_parts` under names that include the recipe's."""
    return {f"{name} of {recipe.name!r}": part for name, part in recipe_parts(recipe, model).items()}


@dataclass
class Figures:
    """Sums over what was answered; those of several workers can be added.

    questions, failed : answered, and ended in an error.
    videos : decoded.
    prefills : how often a video was read by the model; fewer than questions where one prefill served several.
    calls : batches.
    visual_tokens, visual_tokens_kept : in front of every question, and of them those that reach the last layer.
    kv_bytes : of the cache at the end of the answers, padding of the batches included.
    seconds : ``waiting`` for frames, ``choosing`` among them, ``processor``, and ``model``; of the model's, also
        ``encoder``, ``selection``, ``prefill`` and ``decode``.
    notes : what figures do not show.
    """

    questions: int = 0
    failed: int = 0
    videos: int = 0
    prefills: int = 0
    calls: int = 0
    visual_tokens: int = 0
    visual_tokens_kept: int = 0
    kv_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backends: dict[str, int] = field(default_factory=lambda: defaultdict(int))
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
        """Add the time of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    def note(self, sentence: str) -> None:
        """Say it once."""
        if sentence not in self.notes:
            self.notes.append(sentence)


def needs_own_prefill(recipe: Recipe) -> str | None:
    """Why every question needs its own prefill with a recipe; None if one prefill of the video is enough.

    One is enough if nothing of the video depends on the question: with methods before the language model that do not look at
    the question. Methods inside it, cache policies and codecs see the question, or would make a difference to ``generate``.
    """
    for _, method in recipe.build():
        if getattr(method, "needs_question", False):
            return f"{method.name} looks at the question"
        if not isinstance(method, (FramesMethod, PatchMethod, EncoderMethod, ReuseMethod, ProjectorMethod)):
            return f"{method.name} works while the question is read"
    return "positions='paper' changes the positions before the question" if recipe.positions == "paper" else None


@dataclass(frozen=True)
class _Shown:
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


Batch = list[tuple[list[VideoQuestion], _Shown]]


@dataclass(frozen=True)
class _Prefix:
    """A cache with the beginnings of ``V`` prompts up to the end of their videos.

    ids, mask : ``[V, P]``, padded on the left.
    follows : ``[1, V]``, with M-RoPE ``[3, V]``: the position of the first token after each.
    visual, kept : ``[V]``, visual tokens, and those of them that reach the last layer.
    behind : ``[V, T]``, the tokens after it in the prompt of the first question. first : ``[n]``, the same after another video.
    """

    cache: DynamicCache
    state: CacheState
    ids: Tensor
    mask: Tensor
    follows: Tensor
    visual: Tensor
    kept: Tensor
    behind: Tensor
    first: Tensor


class VideoAnswerer:
    """A model that answers questions about videos.

    Parameters
    ----------
    settings : see :class:`QASettings`.
    model, processor : if they are loaded already; the model is restored afterwards.
    say : called with one sentence when something had to change, such as the size of batches.

    Raises
    ------
    MmaccelError
        If the model does not load, or cannot honour the recipe.
    """

    #: models that answer at a time
    workers = 1

    def __init__(
        self,
        settings: QASettings,
        model: Any = None,
        processor: Any = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.settings, self.figures, self._say = settings, Figures(), say
        if model is None:
            model, processor = load_model(
                settings.model,
                device=settings.device,
                dtype=settings.dtype,
                attn=settings.attn,
                trust_remote_code=settings.trust_remote_code,
            )
        if getattr(processor, "video_processor", None) is None:
            raise MmaccelError(f"{settings.model!r} takes no video; give a model that does, such as a Qwen2.5-VL.")
        self.model, self.processor = model, processor
        self.size = settings.most
        self._prepared = prepare(processor, settings.recipe)
        #: keeps draft models and text towers of the recipe
        self._loaded = KeepLoaded()
        with accelerated(model, settings.recipe, processor=self._prepared):
            pass  # reports what the model does not support before the long run
        self._family = family_of(model, processor)
        self._base: Any = self._family.model
        self._own_prefill = needs_own_prefill(settings.recipe)
        if self._family.stateful and not settings.recipe.stages:
            # with a recipe mmaccel runs such layers row by row
            self._own_prefill = "layers with a state would read padding after a video as text"
        #: placeholders of media in prompts
        self._places = [getattr(processor, name, None) for name in ("video_token", "image_token")]

    # --- for the user -----------------------------------------------------------------------------------------
    def answer(self, questions: Sequence[VideoQuestion]) -> list[Record]:
        """A record for each of the questions, in their order, whatever happens to the videos."""
        made = {record["id"]: record for record in self.run(questions)}
        return [made[one.name] for one in questions]

    def run(self, questions: Iterable[VideoQuestion], done: Collection[str] = ()) -> Generator[Record, None, None]:
        """The records of all questions that are not ``done``, as they are finished; the next videos are decoded meanwhile.

        Batches depend on all questions and the batch size, not on what is done: a resumed run gives the same answers to the
        bit.
        """
        done = set(done)
        windows = [
            window
            for window in self.settings.windows(questions)
            if any(one.name not in done for group in window for one in group)
        ]
        shown = (group[0].path for window in windows for group in window if not group[0].error)
        workers = max(2, min(4, (os.cpu_count() or 1) // 2))
        with closing(begin(shown, self.settings.decode_spec(), workers, timeout=self.settings.timeout)) as clips:
            for window in windows:
                yield from self._window(window, clips, done)

    def _window(self, window: list[list[VideoQuestion]], clips: Ahead, done: set[str]) -> Iterator[Record]:
        """The records of a window, in parts if its clips would take too much memory together."""
        batch: Batch = []
        for group in window:
            wanted = [one for one in group if one.name not in done]
            if group[0].error:
                yield from self._failed(wanted, group[0].error)
                continue
            with self.figures.measure("waiting"):
                full = clips.full()
            if full:
                yield from self._answer_all(batch, done)
                clips.release()
            misplaced = [one for one in group if self._place(one)]
            try:
                batch += self._next([one for one in group if one not in misplaced], clips)
            except Exception as caught:
                yield from self._failed(wanted, sentence(caught, "The frames could not be chosen"))
                continue
            for one in misplaced:
                error = f"The question contains the placeholder {self._place(one)!r} of this model; leave it out."
                yield from self._failed([one] if one in wanted else [], error)
        yield from self._answer_all(batch, done)
        clips.release()

    def _next(self, group: list[VideoQuestion], clips: Ahead) -> Batch:
        """The questions of the next video with its frames."""
        with self.figures.measure("waiting"):
            clip = next(clips)
        if isinstance(clip, MmaccelError):
            raise clip
        self.figures.videos += 1
        self.figures.backends[clip.backend] += 1
        return self._chosen(group, clip) if group else []

    def _answer_all(self, batch: Batch, done: set[str]) -> Iterator[Record]:
        """The records of a batch, which is then emptied, so that its clips can be freed."""
        for part in self._batches(batch):
            yield from self._answer(part, done)
        batch.clear()

    def _place(self, one: VideoQuestion) -> str | None:
        """The placeholder that a question contains, if any."""
        return next((place for place in self._places if place and place in one.words()), None)

    # --- batches --------------------------------------------------------------------------------
    def _chosen(self, group: list[VideoQuestion], clip: Clip) -> Batch:
        """The frames for the questions of a video; each question has its own if the choice looks at it."""
        chooser, count, total = self.settings.chooser(), self.settings.frames, len(clip.frames)

        def shown(stay: Iterable[int]) -> _Shown:
            places = list(map(int, stay))
            # some processors refuse a clip of a single frame
            return _Shown(clip, places * 2 if len(places) == 1 else places)

        if chooser is None or total <= count:
            return [(group, shown(range(total)))]
        with self.figures.measure("choosing"):
            if not getattr(chooser, "needs_question", False):
                return [(group, shown(chooser.choose(clip.frames, count / total)))]
            asked: Batch = []
            for one in group:
                method: Any = dataclasses.replace(chooser, query=one.question)  # type: ignore[type-var]
                asked.append(([one], shown(method.choose(clip.frames, count / total))))
            return asked

    def _batches(self, shown: Batch) -> Iterator[Batch]:
        """Prompts of similar length together: equally many frames, then similar sizes and lengths of questions."""
        if self._own_prefill is not None and any(len(group) > 1 for group, _ in shown):
            self.figures.note(f"one prefill a question: {self._own_prefill}")
            shown = [([one], clip) for group, clip in shown for one in group]
        order = sorted(shown, key=lambda s: (len(s[1].stay), s[1].clip.frames[0].size, len(s[0][0].words())))
        batch: Batch = []
        for group, clip in order:
            full = sum(len(g) for g, _ in batch) + len(group) > self.size
            if batch and (full or len(batch[0][1].stay) != len(clip.stay)):
                yield batch
                batch = []
            batch.append((group, clip))
        if batch:
            yield batch

    # --- asking -----------------------------------------------------------------------------------------------
    def _answer(self, batch: Batch, done: set[str]) -> Iterator[Record]:
        """The records of a batch that are not ``done``; questions that fail together are tried one by one."""
        try:
            for one, answer in self._ask(batch, done):
                self.figures.questions += 1
                done.add(one.name)
                yield one.record(answer)
            return
        except (torch.OutOfMemoryError, MemoryError):
            error = "The device ran out of memory; take fewer frames, or weights in bfloat16."
            there = min(self.size, sum(len(group) for group, _ in batch))
            smaller = (there + 1) // 2 if there > 1 else 0
            if self.settings.batch_size != "auto":
                raise MmaccelError(
                    f"The device ran out of memory with {self.size} questions at a time; take a smaller batch size, or 'auto'."
                ) from None
            if smaller:
                self.size = smaller
                self._say(f"Out of memory; continuing with {smaller} question{'s' * (smaller > 1)} at a time.")
                parts = list(self._batches(batch))
            else:
                parts = []
        except Exception as caught:
            error = sentence(caught, "The model could not answer")
            parts = [[([one], clip)] for group, clip in batch for one in group]
            parts = [] if len(parts) == 1 else parts
        if not parts:
            yield from self._failed([one for group, _ in batch for one in group if one.name not in done], error)
        for part in parts:
            yield from self._answer(part, done)

    def _failed(self, questions: Iterable[VideoQuestion], error: str) -> Iterator[Record]:
        for one in questions:
            self.figures.failed += 1
            yield one.failed(error)

    def _ask(self, batch: Batch, done: Collection[str]) -> Iterator[tuple[VideoQuestion, str]]:
        """Questions with their answers, in chunks of at most ``size``; chunks that are done are skipped."""
        rows = [(one, at) for at, (group, _) in enumerate(batch) for one in group]
        chunks = [rows[i : i + self.size] for i in range(0, len(rows), self.size)]
        chunks = [chunk for chunk in chunks if any(one.name not in done for one, _ in chunk)]
        if not chunks:
            return
        # a shared prefill only helps with several questions
        prefix = self._read(batch) if len(rows) > len(batch) else None
        for chunk in chunks:
            if prefix is not None:
                answers = self._go_on(prefix, chunk)
                self.figures.visual_tokens += int(prefix.visual[[at for _, at in chunk]].sum())
                self.figures.visual_tokens_kept += int(prefix.kept[[at for _, at in chunk]].sum())
            else:
                answers = self._generate(chunk, [batch[at][1] for _, at in chunk])
            for (one, _), answer in zip(chunk, answers, strict=True):
                if one.name not in done:
                    yield one, answer

    # --- the model --------------------------------------------------------------------------------------------
    def _encode(self, processor: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
        with self.figures.measure("processor"):
            return dict(encode(processor, prompts).to(self.model.device, self.model.dtype))

    def _generate(self, chunk: Sequence[tuple[VideoQuestion, int]], clips: Sequence[_Shown]) -> list[str]:
        """Answers by one call of ``generate`` on the whole prompts."""
        recipe, processor = self.settings.recipe, self._prepared
        asking = [m for _, m in recipe.build() if isinstance(m, FramesMethod) and getattr(m, "needs_question", False)]
        if asking and not getattr(asking[0], "query", ""):
            if len(chunk) > 1:
                return [self._generate([pair], [clip])[0] for pair, clip in zip(chunk, clips, strict=True)]
            recipe = recipe.override(query=chunk[0][0].question)
            processor = prepare(self.processor, recipe)
        prompts = [Prompt(one.words(), clip=clip.cut()) for (one, _), clip in zip(chunk, clips, strict=True)]
        inputs = self._encode(processor, prompts)
        self.figures.prefills += len(chunk)
        with self._working(recipe, processor):
            answers = self._written(inputs)
            stats = self.model.mmaccel.stats()
        self._count(stats)
        self.figures.visual_tokens += stats["visual_tokens"]
        self.figures.visual_tokens_kept += stats["visual_tokens_kept"]
        self.figures.kv_bytes += stats["kv_bytes"]
        return answers

    def _read(self, batch: Batch) -> _Prefix:
        """One prefill of the videos of a batch: their prompts up to the last visual token and any marks after it that do not
        have positions of text."""
        first = batch[0][0][0].words()
        inputs = self._encode(self._prepared, [Prompt(first, clip=clip.cut()) for _, clip in batch])
        check_positions(self._base, self.settings.recipe, inputs, self.settings.max_new_tokens)
        self.figures.prefills += len(batch)
        ids, family, model = inputs["input_ids"], self._family, self._base
        visual = family.visual(ids)
        # all rows are padded on the left and end with the same question
        end = int(visual.any(0).nonzero().max()) + 1
        cache = DynamicCache()
        state = adopt(cache, family.depth, None, family.recurrent)
        with self._working(self.settings.recipe, self._prepared):
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
        return _Prefix(
            cache,
            state,
            feed["input_ids"],
            feed["attention_mask"],
            follows,
            visual.sum(1),
            kept.sum(1),
            ids[:, end:],
            self._question(batch[0][0][0]),
        )

    def _go_on(self, prefix: _Prefix, chunk: Sequence[tuple[VideoQuestion, int]]) -> list[str]:
        """Answers to questions after videos in the cache, which is restored afterwards."""
        rows = torch.tensor([at for _, at in chunk], device=prefix.ids.device)
        tails = [self._tail(prefix, at, one) for one, at in chunk]
        width = max(map(len, tails))
        new = torch.full((len(tails), width), self.processor.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(new)
        for row, tail in enumerate(tails):
            new[row, width - len(tail) :] = tail
            mask[row, width - len(tail) :] = 1
        new, mask = new.to(prefix.ids), mask.to(prefix.mask)
        state, begin = prefix.state, prefix.follows[:, rows]
        text = (begin[..., None] + mask.cumsum(1) - 1).clamp(min=0)
        positions = torch.cat([text.new_zeros(*text.shape[:-1], prefix.ids.shape[1]), text], dim=-1)
        inputs = {
            "input_ids": torch.cat([prefix.ids[rows], new], dim=1),
            "attention_mask": torch.cat([prefix.mask[rows], mask], dim=1),
            "position_ids": positions[0] if len(positions) == 1 else positions,
        }
        restore = state.snapshot()
        try:
            with self._working(self.settings.recipe, self._prepared):
                prefix.cache.batch_select_indices(rows)
                if state.offset is not None:
                    # with M-RoPE the position of a question may be before that of the last frame
                    state.offset, state.ahead = state.seen - begin[0].to(state.offset), None
                    state.shared.axes_ahead = None
                answers = self._written(inputs, **cache_argument(prefix.cache))
                stats = self.model.mmaccel.stats()
        finally:
            restore()
        self._count(stats)
        self.figures.kv_bytes += stats["kv_bytes"]
        return answers

    def _tail(self, prefix: _Prefix, row: int, one: VideoQuestion) -> Tensor:
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
            ids: Tensor = encode(self.processor, [Prompt(one.words(), clip=blank)])["input_ids"][0]
        return ids[int(self._family.visual(ids).nonzero().max()) + 1 :]

    def _written(self, inputs: Mapping[str, Any], **options: Any) -> list[str]:
        """Greedy answers of ``generate`` to prompts."""
        check_positions(self._base, self.settings.recipe, inputs, self.settings.max_new_tokens)
        out = self.model.generate(
            **inputs, max_new_tokens=self.settings.max_new_tokens, do_sample=False, num_beams=1, **options
        )
        texts = self.processor.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]

    @contextmanager
    def _working(self, recipe: Recipe, processor: Any) -> Iterator[None]:
        with (
            self.figures.measure("model"),
            torch.inference_mode(),
            accelerated(self.model, recipe, processor=processor),
        ):
            yield

    def _count(self, stats: Record) -> None:
        """Add the figures of a call."""
        for name, seconds in stats["seconds"].items():
            self.figures.seconds[name] += seconds
        for note in stats["notes"]:
            self.figures.note(note)


def answer_videos(
    questions: str | os.PathLike[str] | Iterable[VideoQuestion | Mapping[str, Any]],
    model: Any,
    processor: Any = None,
    *,
    recipe: RecipeLike = "balanced",
    retain: float | None = None,
    frames: int = 16,
    frame_method: str = "uniform",
    frame_options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    batch_size: int | Literal["auto"] = "auto",
    timeout: float = 120.0,
    memory: int = 4 * GIB,
    **overrides: Any,
) -> Iterator[Record]:
    """Answer questions about videos; yields records as they are finished.

    Videos come in the order in which the set first names them, except that those of similar length are answered together; the
    ``id`` of a record names its question. A question or video that cannot be used gets a record with an ``error``.

    Parameters
    ----------
    questions : a JSONL file (see :func:`.questions.read_questions`), or questions, or objects like its lines.
    model : a model, or a folder or hub id of one.
    processor : the model's processor; loaded with a model that is named.
    recipe, retain, **overrides : as for :func:`mmaccel.accelerate_vlm`. Methods of site ``frames`` are applied as well.
    frames, frame_method, frame_options, max_new_tokens, batch_size, timeout, memory : see :class:`QASettings`.

    Yields
    ------
    Records as :meth:`VideoQuestion.record` and :meth:`VideoQuestion.failed` make them. They hold no times, so that the same
    question gets the same record.

    Raises
    ------
    MmaccelError
        If there is no question, an option is not allowed, or the model does not support the recipe.

    Examples
    --------
    >>> questions = [{"video": str(folder), "question": "what is there?"}]
    >>> for record in answer_videos(questions, video_model, video_processor, retain=0.25, max_new_tokens=2):
    ...     print(sorted(record))
    ['answer', ...
    """
    chosen = get_recipe(recipe, retain=retain, **overrides)
    named = isinstance(model, (str, os.PathLike))
    settings = QASettings(
        model=os.fspath(model) if named else fingerprint(model),
        recipe=chosen,
        frames=frames,
        frame_method=frame_method,
        frame_options=frame_options or {},
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        timeout=timeout,
        memory=memory,
    )
    asked = as_questions(questions)
    return VideoAnswerer(settings, None if named else model, processor).run(asked)
