"""Bulk video question answering: the next videos are decoded while the model answers.

>>> from mmaccel.programs.video_qa.qa import answer_videos
>>> for record in answer_videos("questions.jsonl", model, processor, recipe="holitom", retain=0.15):
...     print(record["id"], record.get("answer", record.get("error")))

Several questions of one video are answered from one prefill where the recipe allows it: the beginning of the prompt, up to the
video, is read once, and every question continues from that cache, whose keys are stored and read once for all of them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ...accelerate.drafting import draft_of_call
from ...accelerate.fallback import FallbackLike
from ...errors import MmaccelError
from ...families.load import load
from ...method import FrameChoice
from ...method.registry import methods
from ...recipe import Recipe, RecipeLike, Stage, get_recipe
from ...video.clip import Clip
from ...video.decode_spec import GIB, DecodeSpec, Select, check_timeout
from ...video.groups import AT_ONCE, FrameGroups
from ...video.prefetch import Prefetcher, start_prefetch
from ..cache_file import fingerprint_of
from ..drafts import DraftArguments, drafts_identity, for_recipe
from ..evaluate import fingerprint, sentence
from ..identity import digests, recipe_parts, versions
from ..long_video import bounded, needs_all_frames, own_cap, read_groups
from ..session_file import restore, session_data
from ..streaming import VideoSession
from .clip_caches import ClipCaches, content_of
from .generator import AnswerGenerator, Batch, Figures, Shown
from .questions import VideoQuestion, as_questions, by_video

Record = dict[str, Any]

#: questions at a time that ``auto`` begins with
_AUTO = 8
#: a method that chooses frames chooses from so many times as many
_DENSER = 4
#: keys a head that a hint suggests
_CAP = 4096


@dataclass(frozen=True)
class QASettings:
    """Settings of a run, as plain data that can be sent to another process.

    model : a folder or a hub id.
    recipe : of the model.
    frames : frames of a video that the model sees, or all of a shorter one.
    frame_method : ``uniform``, evenly spaced; ``keyframes``, those of the container first; or a method of site ``frames``
        that chooses, such as ``scene-frames``, out of four times as many evenly spaced ones.
    frame_options : options of that method.
    max_new_tokens : longest answer. Answers are greedy.
    batch_size : questions at a time; ``auto`` begins with 8 and halves when memory does not suffice.
    device, dtype, attn, trust_remote_code : as for :func:`mmaccel.load`.
    timeout : seconds that decoding a video may take.
    memory : limit of the decoded frames that are held at a time, in bytes; a video that takes more alone fails. If little
        fits, fewer questions are answered together.
    cap_tokens : clips of more frames than a group (64, or the recipe's ``frames_at_once``) are decoded, encoded and read group
        by group, and a layer holds at most so many keys a head, so that memory does not grow with ``frames``. The recipe's
        policy evicts them; ``infinipot-v`` does where it has none. By default the ``cap`` of the policy; clips are read whole
        where that is not set.
    caches : a folder where the KV cache of every clip is kept, so that a later run with other questions does not encode and
        read it again. Clips are then read one at a time, which may change an answer by rounding. With a recipe that needs a
        prefill for every question it is refused. Delete files of it when you like.
    drafts : arguments ``lossless``, ``draft`` (a folder or a hub id), ``lookup`` and ``fallback`` of
        :func:`mmaccel.accelerate_vlm`.

    Raises MmaccelError if a value is not allowed, or clips of so many frames cannot be read group by group.
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
    cap_tokens: int | None = None
    caches: str | None = None
    drafts: DraftArguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe.build()
        self.chooser()
        for name in ("frames", "max_new_tokens", "memory", "batch_size", "cap_tokens"):
            value = getattr(self, name)
            if (name, value) not in (("batch_size", "auto"), ("cap_tokens", None)) and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise MmaccelError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.caches is not None and not isinstance(self.caches, str):
            raise MmaccelError(f"caches must be a folder, got {self.caches!r}.")
        check_timeout(self.timeout)
        object.__setattr__(self, "drafts", for_recipe(self.drafts, self.recipe))
        self.decode_spec()
        if self.long and self.cap_tokens is not None and (why := self._needs_all) is not None:
            raise MmaccelError(
                f"Clips of {self.frames} frames cannot be read group by group, as cap_tokens={self.cap_tokens} asks: {why}; "
                "leave it out, or use a recipe such as 'infinipot-v'."
            )

    def decode_spec(self) -> DecodeSpec:
        """Settings of the frames of a video that are decoded."""
        denser = 1 if self.chooser() is None else _DENSER
        select: Select = "keyframes" if self.frame_method == "keyframes" else "uniform"
        return DecodeSpec(self.frames * denser, select=select, threads=1, memory=self.memory)

    def chooser(self) -> FrameChoice | None:
        """The method that chooses frames, if ``frame_method`` is one."""
        if self.frame_method in ("uniform", "keyframes"):
            return None
        choosing = [name for name, method in methods().items() if issubclass(method, FrameChoice)]
        if self.frame_method not in choosing:
            raise MmaccelError(
                f"frame_method must be uniform, keyframes, {', '.join(choosing)}, got {self.frame_method!r}."
            )
        built = self._choice().stages[0].build()
        assert isinstance(built, FrameChoice)
        return built

    @property
    def long(self) -> bool:
        """Whether clips may have more frames than a group."""
        return self.frames > (self.recipe.frames_at_once or AT_ONCE)

    @property
    def _needs_all(self) -> str | None:
        """The reason why a clip cannot be read group by group."""
        if self.frame_method != "uniform":
            return f"frame_method={self.frame_method!r} chooses among all frames"
        return "drafts and a fallback begin with the whole prompt" if self.drafts else needs_all_frames(self.recipe)

    @property
    def cap(self) -> int | None:
        """Keys a head of long clips that are read group by group; None if clips are read whole."""
        cap = (self.cap_tokens or own_cap(self.recipe)) if self.long else None
        return None if cap is None or self._needs_all is not None else cap

    def hint(self) -> str | None:
        """A sentence to read before long clips are read whole; None where they are not."""
        if not self.long or self.cap is not None:
            return None
        why = self._needs_all
        remedy = f"give --cap-tokens {_CAP} to read them group by group"
        if why is not None:
            remedy = (
                f"{why}, so take fewer frames where memory is short, or --recipe infinipot-v with --cap-tokens {_CAP}"
            )
        return f"Clips of up to {self.frames} frames are read whole, and memory grows with them; {remedy}."

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
        """Settings that a run must share with an earlier one to resume it, see :class:`.answers.AnswerFile`. Raises
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
            **self._parts(self.recipe if self.cap is None else bounded(self.recipe, self.cap)),
            "frames": self.frames,
            "frame_method": self.frame_method,
            "frame_options": dict(self.frame_options),
            **({} if self.chooser() is None else self._parts(self._choice())),
            "max_new_tokens": self.max_new_tokens,
            "prompt": asked,
            **({} if self.cap_tokens is None else {"cap_tokens": self.cap}),
            **({} if self.caches is None else {"caches": True}),
            **drafts_identity(self.drafts),
            **versions(),
        }

    def _parts(self, recipe: Recipe) -> dict[str, str]:
        return {f"{name} of {recipe.name!r}": part for name, part in recipe_parts(recipe, self.model).items()}

    def _choice(self) -> Recipe:
        return Recipe(f"frames by {self.frame_method}", (Stage(self.frame_method, 1.0, self.frame_options),))


class _LongClips:
    """Clips that are read group by group, with at most ``cap`` keys a head, or taken from ``caches``.

    Raises MmaccelError if the model cannot follow a stream.
    """

    def __init__(self, generator: AnswerGenerator, settings: QASettings, cap: int, caches: ClipCaches | None) -> None:
        self._figures, self._settings, self._caches = generator.figures, settings, caches
        self._session = generator.model, bounded(settings.recipe, cap)
        self._options: dict[str, Any] = {"processor": generator.prepared, "cap_tokens": cap}
        VideoSession(*self._session, **self._options)
        self._figures.note(f"clips are read group by group, in a cache of {cap} keys a head (cap)")

    def follow(self, path: str) -> VideoSession:
        """A session that has seen a video."""
        if self._caches is None:
            return self._read(path)
        session, about = VideoSession(*self._session, **self._options), content_of(path)
        if (found := self._caches.find(about)) is not None:
            restore(session, found)
            return session
        session = self._read(path)
        if session.frames:
            self._caches.keep(about, session_data(session))
        return session

    def _read(self, path: str) -> VideoSession:
        settings, figures = self._settings, self._figures
        how: dict[str, Any] = {"isolated": True, "timeout": settings.timeout, "memory": settings.memory}
        groups = FrameGroups(path, settings.frames, **how)
        session = read_groups(groups, *self._session, **self._options)
        figures.videos += 1
        figures.backends[groups.backend] += 1
        figures.prefills += 1
        return session


class VideoAnswerer:
    """A model that answers questions about videos.

    settings : see :class:`QASettings`.
    model, processor : if they are loaded already; the model is restored afterwards.
    say : called with one sentence when something had to change, such as the size of batches.

    Raises MmaccelError if the model does not load, or cannot honour the recipe.
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
        self.settings, self._say = settings, say
        if model is None:
            model, processor = load(
                settings.model,
                device=settings.device,
                dtype=settings.dtype,
                attn=settings.attn,
                trust_remote_code=settings.trust_remote_code,
            )
        if getattr(processor, "video_processor", None) is None:
            raise MmaccelError(f"{settings.model!r} takes no video; give a model that does, such as a Qwen2.5-VL.")
        self.generator = AnswerGenerator(model, processor, settings.recipe, settings.max_new_tokens, settings.drafts)
        self.caches = None if settings.caches is None else _caches(self.generator, settings)
        self._long = None if settings.cap is None else _LongClips(self.generator, settings, settings.cap, self.caches)
        self.size = settings.most
        #: placeholders of media in prompts
        self._placeholders = [getattr(processor, name, None) for name in ("video_token", "image_token")]

    @property
    def figures(self) -> Figures:
        """Figures of what was answered."""
        return self.generator.figures

    # --- for the user -----------------------------------------------------------------------------------------
    def answer(self, questions: Sequence[VideoQuestion]) -> list[Record]:
        """A record for each of the questions, in their order, whatever happens to the videos."""
        records = {record["id"]: record for record in self.run(questions)}
        return [records[one.name] for one in questions]

    def run(self, questions: Iterable[VideoQuestion], done: Collection[str] = ()) -> Generator[Record, None, None]:
        """The records of all questions that are not ``done``, as they are finished; the next videos are decoded meanwhile.

        Batches depend on all questions and the batch size, not on what is done: a resumed run gives the same answers to the
        bit.
        """
        done = set(done)
        if self.settings.cap is not None:
            for group in by_video(questions):
                yield from self._streamed(group, done)
            return
        windows = [
            window
            for window in self.settings.windows(questions)
            if any(one.name not in done for group in window for one in group)
        ]
        shown = (group[0].path for window in windows for group in window if not group[0].error)
        workers = max(2, min(4, (os.cpu_count() or 1) // 2))
        with closing(
            start_prefetch(shown, self.settings.decode_spec(), workers, timeout=self.settings.timeout)
        ) as clips:
            for window in windows:
                yield from self._window(window, clips, done)

    def _window(self, window: list[list[VideoQuestion]], clips: Prefetcher, done: set[str]) -> Iterator[Record]:
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
            misplaced = [one for one in group if self._placeholder(one)]
            try:
                batch += self._next([one for one in group if one not in misplaced], clips)
            except Exception as caught:
                yield from self._failed(wanted, sentence(caught, "The frames could not be chosen"))
                continue
            for one in misplaced:
                yield from self._failed([one] if one in wanted else [], self._placeholder(one) or "")
        yield from self._answer_all(batch, done)
        clips.release()

    def _next(self, group: list[VideoQuestion], clips: Prefetcher) -> Batch:
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

    def _placeholder(self, one: VideoQuestion) -> str | None:
        """The error of a question that contains a placeholder of the model."""
        found = (text for text in self._placeholders if text and text in one.words())
        return next(
            (f"The question contains the placeholder {text!r} of this model; leave it out." for text in found), None
        )

    # --- long clips ---------------------------------------------------------------------------------------------
    def _streamed(self, group: list[VideoQuestion], done: set[str]) -> Iterator[Record]:
        """The records of the questions about one long video, which is decoded, encoded, reduced and read group by group."""
        wanted = [one for one in group if one.name not in done]
        if not wanted or group[0].error:
            yield from self._failed(wanted, group[0].error or "")
            return
        figures, long = self.figures, self._long
        assert long is not None
        try:
            with figures.measure("model"):
                session = long.follow(group[0].path)
        except Exception as caught:
            yield from self._failed(wanted, sentence(caught, "The video could not be read"))
            return
        for one in wanted:
            if (error := self._placeholder(one)) is not None:
                yield from self._failed([one], error)
                continue
            try:
                with figures.measure("model"):
                    answer = session.ask(one.words(), self.settings.max_new_tokens)
            except Exception as caught:
                yield from self._failed([one], sentence(caught, "The model could not answer"))
                continue
            figures.questions += 1
            figures.visual_tokens += session.visual_tokens
            figures.visual_tokens_kept += min(session.visual_tokens, session.tokens())
            figures.kv_bytes += session.nbytes()
            yield one.record(answer)

    # --- batches --------------------------------------------------------------------------------
    def _chosen(self, group: list[VideoQuestion], clip: Clip) -> Batch:
        """The frames for the questions of a video; each question has its own if the choice looks at it."""
        chooser, count, total = self.settings.chooser(), self.settings.frames, len(clip.frames)

        def shown(stay: Iterable[int]) -> Shown:
            places = list(map(int, stay))
            # some processors refuse a clip of a single frame
            return Shown(clip, places * 2 if len(places) == 1 else places)

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
        if self.generator.own_prefill is not None and any(len(group) > 1 for group, _ in shown):
            self.figures.note(f"one prefill a question: {self.generator.own_prefill}")
            shown = [([one], clip) for group, clip in shown for one in group]
        order = sorted(shown, key=lambda s: (len(s[1].stay), s[1].clip.frames[0].size, len(s[0][0].words())))
        batch: Batch = []
        for group, clip in order:
            full = self.caches is not None or sum(len(g) for g, _ in batch) + len(group) > self.size
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
            size, parts = min(self.size, sum(len(group) for group, _ in batch)), []
            if self.settings.batch_size != "auto":
                raise MmaccelError(
                    f"The device ran out of memory with {self.size} questions at a time; take a smaller batch size, or 'auto'."
                ) from None
            if size > 1:
                self.size = (size + 1) // 2
                self._say(f"Out of memory; continuing with {self.size} question{'s' * (self.size > 1)} at a time.")
                parts = list(self._batches(batch))
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
        # a shared prefill only helps with several questions, now or in a later run
        shared = self.caches is not None or len(rows) > len(batch)
        prefix = self.generator.read(batch, self.caches) if shared else None
        for chunk in chunks:
            if prefix is not None:
                answers = self.generator.resume(prefix, chunk)
                self.figures.visual_tokens += int(prefix.visual[[at for _, at in chunk]].sum())
                self.figures.visual_tokens_kept += int(prefix.kept[[at for _, at in chunk]].sum())
            else:
                answers = self.generator.generate(chunk, [batch[at][1] for _, at in chunk])
            for (one, _), answer in zip(chunk, answers, strict=True):
                if one.name not in done:
                    yield one, answer


def _caches(generator: AnswerGenerator, settings: QASettings) -> ClipCaches:
    """The folder of clips that were read before. Raises MmaccelError if it cannot be used."""
    assert settings.caches is not None
    if settings.cap is None and (why := generator.own_prefill) is not None:
        raise MmaccelError(
            f"caches= cannot be used here: {why}, so every question reads its clip again; leave it out, or use a recipe "
            "such as 'balanced'."
        )
    more = "video-qa", settings.cap, settings.frames
    same = fingerprint_of(generator.model, settings.recipe, *more, processor=generator.processor)
    return ClipCaches(settings.caches, generator.model, same, generator.figures.note)


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
    cap_tokens: int | None = None,
    caches: str | os.PathLike[str] | None = None,
    lossless: bool = False,
    draft: Any = None,
    lookup: bool | str = False,
    fallback: FallbackLike = None,
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
    recipe, retain, lossless, draft, lookup, fallback, **overrides : as for :func:`mmaccel.accelerate_vlm`. Methods of site
        ``frames`` are applied as well.
    frames, frame_method, frame_options, max_new_tokens, batch_size, timeout, memory, cap_tokens, caches : see
        :class:`QASettings`.

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
    draft, overrides = draft_of_call(recipe, lossless, draft, overrides)
    chosen = get_recipe(recipe, retain=retain, **overrides)
    drafts = {"lossless": lossless, "draft": draft, "lookup": lookup, "fallback": fallback}
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
        cap_tokens=cap_tokens,
        caches=None if caches is None else os.fspath(caches),
        drafts={name: value for name, value in drafts.items() if value not in (False, None)},
    )
    asked = as_questions(questions)
    return VideoAnswerer(settings, None if named else model, processor).run(asked)
