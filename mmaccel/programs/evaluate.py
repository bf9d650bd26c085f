"""Changes of answers by a recipe: accuracy, loyalty and KL divergence against the unaccelerated model, tokens and bytes kept.

>>> from mmaccel.programs.evaluate import Row, ask_suite, evaluate
>>> rows = [Row("none"), Row("divprune", 0.5), Row("divprune", 0.1)]
>>> for row, answers in evaluate(model, processor, ask_suite(["count"], 20), rows):
...     pass
>>> [row.figures()["accuracy"] for row in rows]

The unaccelerated model (recipe ``none``) writes its greedy answer; then every recipe is run twice on the same inputs:

- *forced*: the model is made to write the same answer. Both models condition every distribution on the same text, so that the
  KL divergence is defined at every token of the answer, and the caches are equally long.
- *free*: the model writes its own greedy answer, which is judged. This is skipped if every token of the answer was the most
  likely one in the forced run, unless drafts are wanted. Lossless answers are written freely alone.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from ..accelerate import accelerated
from ..accelerate.positions import check_positions
from ..accelerate.tuned import fingerprint as fingerprint
from ..core.budget import budget_text
from ..core.figures import DRAFT_SUMS
from ..errors import MmaccelError, first_line
from ..media.files import Clip, Prompt, encode, is_media, load_media, moves
from ..media.prepare import prepare
from ..method.model_options import KeepLoaded
from ..recipe import Recipe, get_recipe
from ..suite import Item, Sample, is_right, make_suite
from .drafts import DraftArguments, drafting_sums, drafts_title, for_recipe, readings
from .tune.confidence import interval


@dataclass(frozen=True)
class Question:
    """One question of a set. ``load`` reads or draws its media; ``expected`` is None if the answer is unknown. ``sample`` (its
    files) and ``frames`` (of a video) let :func:`mmaccel.programs.identity.question_identity` hash files without decoding."""

    name: str
    task: str
    expected: str | None
    load: Callable[[], Prompt]
    sample: Sample | None = None
    frames: int = 0

    @property
    def label(self) -> str:
        """Its place and name for messages: ``questions.jsonl, line 5, id 'cat'``."""
        where = "" if self.sample is None else self.sample.where
        return self.name if not where else where if where.endswith(self.name) else f"{where}, id {self.name!r}"


def ask_suite(
    tasks: Iterable[str],
    per_task: int = 100,
    *,
    split: str = "test",
    frames: int = 16,
    pixels: int = 112,
    first: int = 0,
) -> list[Question]:
    """``per_task`` questions of every task of :mod:`mmaccel.suite`; pictures are drawn when they are loaded.

    Parameters
    ----------
    tasks : of ``IMAGE_TASKS`` and ``VIDEO_TASKS``.
    frames : length of a clip, an even number of at least 8.
    pixels : side of a picture.
    first : number of the first question of each task, where earlier ones have been used for choosing.
    """

    def question(item: Item) -> Question:
        return Question(item.name, item.task, item.answer, lambda: _drawn(item, pixels))

    return [question(item) for item in make_suite(split, list(tasks), per_task, frames=frames, first=first)]


def _drawn(item: Item, pixels: int) -> Prompt:
    clip, shown = None, item.frames(pixels)
    if item.clip is not None and shown is not None:
        clip = Clip(shown, list(range(len(shown))), len(shown), item.clip.fps)
    pictures = tuple(Image.fromarray(picture) for picture in item.pictures(pixels))
    earlier = tuple((turn.question, turn.answer) for turn in item.turns[:-1])
    return Prompt(item.turns[-1].question, pictures, clip, earlier)


def ask_samples(samples: Iterable[Sample], *, frames: int = 16) -> list[Question]:
    """The questions of a JSONL set (:func:`mmaccel.suite.read_samples`), with ``frames`` evenly spaced frames of a video."""

    def question(sample: Sample) -> Question:
        return Question(sample.name, sample.task or "all", sample.answer, lambda: _read(sample, frames), sample, frames)

    return [question(sample) for sample in samples]


def ask_folder(folder: str | Path, question: str, *, frames: int = 16) -> list[Question]:
    """The same question about every picture, then every video of a folder, in the order of names; a subfolder is a clip. Raises
    MmaccelError if the folder has neither."""
    files = sorted((path for path in Path(folder).iterdir() if is_media(path)), key=lambda path: (moves(path), path))
    if not files:
        raise MmaccelError(f"The folder {str(folder)!r} holds no picture and no video; give another.")

    def sample(path: Path) -> Sample:
        images, video = ((), path) if moves(path) else ((path,), None)
        return Sample(question, images=images, video=video, name=path.name)

    return ask_samples(map(sample, files), frames=frames)


def _read(sample: Sample, frames: int) -> Prompt:
    paths = [*sample.images, *([sample.video] if sample.video else [])]
    pictures, clip = load_media(paths, frames, 1.0)
    return Prompt(sample.question, tuple(pictures), clip, sample.earlier)


# ------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Answer:
    """Result of one recipe on one question.

    ``right`` is None without an expected answer; ``same`` compares the text with the unaccelerated answer ``full``; ``kl``
    is KL(unaccelerated || accelerated) in nats, the mean over the tokens of ``full``, its end included. Tokens and bytes
    are means over the questions of a batch, with a fallback over all readings of each, as are the sums in ``drafting``, which
    is empty without drafts, and ``read_again``, the share of a batch that a fallback read again; ``notes`` are those of
    ``model.mmaccel.stats()`` for that batch.
    """

    name: str
    task: str
    expected: str | None
    full: str
    answer: str
    right: bool | None
    same: bool
    kl: float
    visual_tokens: float
    visual_tokens_kept: float
    visual_tokens_per_layer: float
    kv_bytes: float
    visual_tokens_full: float
    kv_bytes_full: float
    notes: tuple[str, ...] = ()
    drafting: dict[str, float] = dataclasses.field(default_factory=dict)
    read_again: float = 0.0


_SUMMED = (
    *("questions", "judged", "right", "same", "kl", "visual_tokens", "visual_tokens_kept", "visual_tokens_per_layer"),
    *("kv_bytes", "visual_tokens_full", "kv_bytes_full", "read_again"),
    *DRAFT_SUMS,
)


class Sums(dict[str, float]):
    """Sums over answers by name, from which all figures follow."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        super().__init__(dict.fromkeys(_SUMMED, 0) | dict(values or {}))

    def add(self, other: Mapping[str, Any]) -> None:
        """Add other sums."""
        for name in self:
            self[name] += other.get(name, 0)

    def figures(self) -> dict[str, Any]:
        """Means over questions; shares are of what the unaccelerated model holds. None where there is nothing to divide. An
        ``..._interval`` is the exact 95 % interval of a share of answers, ``[low, high]``; ``drafting`` has the sums of
        :data:`mmaccel.core.figures.DRAFT_SUMS`, or is empty without drafts."""

        def over(name: str, by: str = "questions") -> float | None:
            return self[name] / self[by] if self[by] else None

        def between(name: str, by: str) -> list[float] | None:
            return list(interval(int(self[name]), int(self[by]))) if self[by] else None

        means = ("kl", "visual_tokens", "visual_tokens_kept", "visual_tokens_per_layer")
        return {
            "questions": self["questions"],
            "accuracy": over("right", "judged"),
            "accuracy_interval": between("right", "judged"),
            "loyalty": over("same"),
            "loyalty_interval": between("same", "questions"),
            **{name: over(name) for name in means},
            "visual_share_per_layer": over("visual_tokens_per_layer", "visual_tokens_full"),
            "kv_bytes": over("kv_bytes"),
            "kv_share": over("kv_bytes", "kv_bytes_full"),
            "read_again": over("read_again"),
            "drafting": {name: round(self[name]) for name in DRAFT_SUMS} if self["tokens"] else {},
        }


class Row:
    """One recipe with its budget, and its results so far.

    ``batches`` counts the batches that are done, so that an interrupted run can resume from :meth:`as_dict`. ``failed`` lists
    questions that this recipe could not answer, ``{"question": label, "error": reason}``; they are in no figure. ``name`` is
    the recipe's, unless another row has the same. ``identity`` is the result of :func:`.identity.recipe_parts`. ``drafts`` are
    the arguments ``lossless``, ``draft``, ``lookup`` and ``fallback`` of :func:`mmaccel.accelerate_vlm`.
    """

    def __init__(
        self,
        recipe: str | Path | Mapping[str, Any] | Recipe,
        retain: float | None = None,
        drafts: DraftArguments | None = None,
    ) -> None:
        self.recipe = get_recipe(recipe)
        if retain is not None:
            self.recipe = self.recipe.override(retain=retain)
        self.recipe.build()
        self.drafts = for_recipe(drafts or {}, self.recipe)
        self.name, self.batches = self.recipe.name, 0
        self.tasks: dict[str, Sums] = {}
        self.notes: list[str] = []
        self.failed: list[dict[str, str]] = []
        self.identity: dict[str, str] = {}

    @property
    def title(self) -> str:
        """Name, budget and drafts, such as ``divprune 0.25``: ``1`` is a token a picture, ``1.0`` all of them."""
        name = self.name if self.recipe.retain is None else f"{self.name} {budget_text(self.recipe.retain)}"
        return ", ".join([name, *filter(None, [drafts_title(self.drafts)])])

    @property
    def asked(self) -> int:
        """Questions that were answered or failed."""
        return sum(int(sums["questions"]) for sums in self.tasks.values()) + len(self.failed)

    def add(self, answers: Iterable[Answer], failed: Iterable[dict[str, str]] = ()) -> None:
        """Count a batch."""
        self.batches += 1
        self.failed += failed
        for answer in answers:
            counts = {"questions": 1, "judged": answer.right is not None, "right": bool(answer.right)}
            self.tasks.setdefault(answer.task, Sums()).add(vars(answer) | answer.drafting | counts)
            self.notes = list(dict.fromkeys((*self.notes, *answer.notes)))

    def figures(self) -> dict[str, Any]:
        """:meth:`Sums.figures` over the questions of all tasks."""
        total = Sums()
        for sums in self.tasks.values():
            total.add(sums)
        return total.figures()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for :meth:`restore`."""
        return {
            "title": self.title,
            "name": self.name,
            "retain": self.recipe.retain,
            "recipe": dataclasses.asdict(self.recipe),
            "identity": self.identity,
            "batches": self.batches,
            "figures": self.figures(),
            "notes": self.notes,
            "failed": self.failed,
            "tasks": {task: {"figures": s.figures(), "sums": dict(s)} for task, s in self.tasks.items()},
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Load the results of an earlier run with the same recipe."""
        self.batches, self.notes, self.failed = int(data["batches"]), list(data["notes"]), list(data["failed"])
        self.tasks = {task: Sums(results["sums"]) for task, results in data["tasks"].items()}


# ------------------------------------------------------------------------------------------------------------- running


def evaluate(
    model: Any,
    processor: Any,
    questions: Sequence[Question],
    rows: Sequence[Row],
    *,
    batch_size: int = 16,
    max_new_tokens: int = 32,
    complain: Callable[[str], None] | None = None,
) -> Iterator[tuple[Row, list[Answer]]]:
    """Ask every question with every recipe, batch by batch, and yield a row and its new answers when a batch is done.

    The unaccelerated answers of a batch are computed once and used for all rows; batches that a row has done already
    (:meth:`Row.restore`) are left out. Batches hold questions with equally many pictures or frames. The model is left as
    it came.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`.
    rows : what to try; they are filled in place. A row of recipe ``none`` gets the unaccelerated run.
    batch_size : questions a batch; the last ones of a kind make a smaller batch.
    max_new_tokens : longest answer.
    complain : called with one sentence for every question that cannot be read or that the unaccelerated model cannot answer; it
        is then left out, and its batch goes on without it. What only a recipe cannot answer is in :attr:`Row.failed`. Without
        ``complain`` both are errors.

    Raises
    ------
    MmaccelError
        If there is no question, a recipe cannot be honoured by this model, or the device runs out of memory.
    """
    if not questions:
        raise MmaccelError("There is no question to ask; the set is empty.")
    if batch_size < 1 or max_new_tokens < 1:
        raise MmaccelError("batch_size and max_new_tokens must be 1 or more.")
    usable, say = 0, complain or (lambda sentence: None)
    with KeepLoaded(), memory_error():
        # what the processor would drop, a model that answers as the full one does must see
        workers = [(row, processor if row.drafts.get("lossless") else prepare(processor, row.recipe)) for row in rows]
        for row, worker in workers:
            with accelerated(model, row.recipe, processor=worker, **row.drafts):
                pass  # raises what the model does not support before the long run
        for number, batch in enumerate(batches(questions, batch_size, complain)):
            pending = [(row, worker) for row, worker in workers if row.batches <= number]
            if not pending:
                usable += len(batch)
                continue
            failures, fail = _failures(complain is None)
            runners = halved(batch, lambda part: _Runner(model, processor, part, max_new_tokens), fail)
            usable += sum(len(runner.batch) for runner in runners)
            for failure in failures:
                say(f"{failure['question']}: {failure['error']}")
            for row, worker in pending:
                failures, fail = _failures(complain is None)
                answers = [one for runner in runners for one in _answers(runner, row, worker, fail)]
                row.add(answers, failures)
                yield row, answers
    if not usable:
        raise MmaccelError(
            "No question of the set can be asked: none has pictures or a video that can be read and used."
        )


@contextmanager
def memory_error(remedy: str = "take a smaller batch, fewer frames, or weights in bfloat16") -> Iterator[None]:
    """Turn an OutOfMemoryError of the block into a MmaccelError with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MmaccelError(f"The device ran out of memory; {remedy}.") from error


Batch = list[tuple[Question, Prompt]]


def sentence(error: Exception, what: str) -> str:
    """The first line of an error of ours; of another one with ``what`` it kept from being done, and its type."""
    first = first_line(error)
    return first if isinstance(error, MmaccelError) else f"{what} ({type(error).__name__}: {first})."


def batches(questions: Sequence[Question], size: int, complain: Callable[[str], None] | None = None) -> Iterator[Batch]:
    """Questions with equally many pictures or frames together, in their order, loaded when they are needed; ``complain`` as in
    :func:`evaluate`."""
    waiting: dict[tuple[int, int], Batch] = defaultdict(list)
    for question in questions:
        try:
            prompt = question.load()
        except Exception as error:
            if complain is None:
                raise
            complain(f"{question.label}: {sentence(error, 'It cannot be read')}")
            continue
        kind = len(prompt.pictures), len(prompt.clip.frames) if prompt.clip is not None else 0
        waiting[kind].append((question, prompt))
        if len(waiting[kind]) == size:
            yield waiting.pop(kind)
    yield from waiting.values()


def inputs_of(model: Any, processor: Any, batch: Batch) -> dict[str, Any]:
    """A batch as the model reads it: on its device, pixels in its dtype."""
    return dict(encode(processor, [prompt for _, prompt in batch]).to(model.device, model.dtype))


@dataclass(frozen=True)
class _Written:
    """A run: tokens ``[B, T]``, logits ``[B, V]`` before any processing at each of ``T`` steps, texts, statistics."""

    tokens: Tensor
    logits: tuple[Tensor, ...]
    texts: list[str]
    stats: dict[str, Any]


class _Runner:
    """One batch, and the unaccelerated answers to it."""

    def __init__(self, model: Any, processor: Any, batch: Batch, longest: int) -> None:
        self.model, self.processor, self.batch, self.longest = model, processor, batch, longest
        self.inputs = inputs_of(model, processor, batch)
        self.none = get_recipe("none")
        self.full = self._generate(self.none, processor, self.inputs, longest)
        self.lengths = answer_lengths(self.full.tokens, model.generation_config.eos_token_id)

    def drafted(self, drafts: DraftArguments, recipe: Recipe, processor: Any) -> list[Answer]:
        """Answers with drafts or a fallback. Lossless ones are compared with the full ones as they are; else the model of the
        recipe is made to write the full answers without them."""
        if "fallback" in drafts or (not drafts.get("lossless") and recipe != self.none):
            forced, kl, _ = self._forced(recipe, processor)
            free = self._generate(recipe, processor, self._inputs(processor), self.longest, drafts=drafts)
            return self._judged(free.texts, kl, forced.stats, free.stats)
        free = self._generate(recipe, processor, self.inputs, self.longest, drafts=drafts)
        steps = min(self.full.tokens.shape[1], free.tokens.shape[1])
        same = (self.full.tokens[:, :steps] == free.tokens[:, :steps]).long().cumprod(1).sum(1)
        # distributions are comparable behind the same text
        lengths = (same + 1).clamp(max=steps).minimum(self.lengths)
        kl = divergence(self.full.logits[:steps], free.logits[:steps], lengths).tolist()
        return self._judged(free.texts, kl, free.stats, free.stats)

    def answers(self, recipe: Recipe, processor: Any) -> list[Answer]:
        """Answers without drafts."""
        texts, kl, stats = self.full.texts, [0.0] * len(self.batch), self.full.stats
        if recipe != self.none:
            forced, kl, follow = self._forced(recipe, processor)
            stats = forced.stats
            steps = torch.arange(follow.would.shape[1], device=follow.would.device)
            left = (~follow.would & (steps < self.lengths[:, None])).any(1).nonzero()[:, 0].tolist()
            if left:
                again = inputs_of(self.model, processor, [self.batch[row] for row in left])
                free = self._generate(recipe, processor, again, self.longest)
                texts = list(texts)
                for row, text in zip(left, free.texts, strict=True):
                    texts[row] = text
        return self._judged(texts, kl, stats, stats)

    def _inputs(self, processor: Any) -> dict[str, Any]:
        return self.inputs if processor is self.processor else inputs_of(self.model, processor, self.batch)

    def _forced(self, recipe: Recipe, processor: Any) -> tuple[_Written, list[float], _Follow]:
        """The run in which the model is made to write the full answers, and the KL divergence of each."""
        inputs = self._inputs(processor)
        follow = _Follow(self.full.tokens, inputs["input_ids"].shape[1])
        forced = self._generate(recipe, processor, inputs, self.full.tokens.shape[1], follow)
        return forced, divergence(self.full.logits, forced.logits, self.lengths).tolist(), follow

    def _judged(
        self, texts: Sequence[str], kl: Sequence[float], stats: dict[str, Any], free: dict[str, Any]
    ) -> list[Answer]:
        """The answers ``texts``, with tokens and bytes of the run with ``stats``, and drafts of the one with ``free``."""
        drafting, notes = drafting_sums(free, len(self.batch)), tuple(dict.fromkeys(stats["notes"] + free["notes"]))
        figures = {
            name: stats[name] / len(self.batch)
            for name in ("visual_tokens", "visual_tokens_kept", "visual_tokens_per_layer", "kv_bytes")
        }
        figures |= {name: total / len(self.batch) for name, total in readings(free).items()}
        figures |= {f"{name}_full": self.full.stats[name] / len(self.batch) for name in ("visual_tokens", "kv_bytes")}
        return [
            Answer(
                question.name,
                question.task,
                question.expected,
                full,
                text,
                None if question.expected is None else is_right(text, question.expected),
                text == full,
                distance,
                **figures,
                notes=notes,
                drafting=drafting,
            )
            for (question, _), full, text, distance in zip(self.batch, self.full.texts, texts, kl, strict=True)
        ]

    def _generate(
        self,
        recipe: Recipe,
        processor: Any,
        inputs: Any,
        longest: int,
        follow: _Follow | None = None,
        drafts: DraftArguments | None = None,
    ) -> _Written:
        drafts = drafts or {}
        check_positions(self.model, self.none if drafts.get("lossless") else recipe, inputs, longest)
        with torch.inference_mode(), accelerated(self.model, recipe, processor=processor, **drafts):
            out = self.model.generate(
                **inputs,
                max_new_tokens=longest,
                do_sample=False,
                num_beams=1,
                return_dict_in_generate=True,
                # rows of several readings have none in common
                output_logits="fallback" not in drafts,
                logits_processor=LogitsProcessorList([follow] if follow else []),
            )
            stats = self.model.mmaccel.stats()
        tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
        texts = self.processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return _Written(tokens, out.get("logits") or (), [text.strip() for text in texts], stats)


Fail = Callable[[Question, Exception], None]
T = TypeVar("T")


def _failures(fatal: bool) -> tuple[list[dict[str, str]], Fail]:
    """A list, and a function that adds a question and its error to it, or raises the error if errors are ``fatal``."""
    failures: list[dict[str, str]] = []

    def fail(question: Question, error: Exception) -> None:
        if fatal:
            raise error
        failures.append({"question": question.label, "error": sentence(error, "The model cannot answer it")})

    return failures, fail


def halved(
    batch: Batch,
    run: Callable[[Batch], T],
    fail: Fail,
    fatal: tuple[type[Exception], ...] = (torch.OutOfMemoryError,),
) -> list[T]:
    """Results of ``run`` for a batch; where it fails, for its halves, and so on, so that ``fail`` gets the questions that
    fail alone. Errors that are ``fatal`` have other causes than a question and are raised."""
    try:
        return [run(batch)]
    except fatal:
        raise
    except Exception as error:
        if len(batch) == 1:
            fail(batch[0][0], error)
            return []
    half = len(batch) // 2
    return [one for part in (batch[:half], batch[half:]) for one in halved(part, run, fail, fatal)]


def _answers(runner: _Runner, row: Row, processor: Any, fail: Fail) -> list[Answer]:
    """The answers to a batch under the recipe of a row, without the questions that it cannot answer."""

    def answers(part: Batch) -> list[Answer]:
        whole = part is runner.batch
        one = runner if whole else _Runner(runner.model, runner.processor, part, runner.longest)
        if row.drafts:
            return one.drafted(row.drafts, row.recipe, processor)
        return one.answers(row.recipe, processor)

    return [one for part in halved(runner.batch, answers, fail) for one in part]


class _Follow(LogitsProcessor):
    """Makes ``generate`` write given tokens ``[B, T]``; ``would`` notes where it would have done so unforced."""

    def __init__(self, tokens: Tensor, prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt
        self.would = torch.zeros_like(tokens, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt
        wanted = self.tokens[:, step]
        self.would[:, step] = scores.argmax(-1) == wanted
        return torch.full_like(scores, -torch.inf).scatter(1, wanted[:, None], 0.0)


def answer_lengths(tokens: Tensor, end: int | list[int] | None) -> Tensor:
    """``[B]``: tokens of every answer ``[B, T]``, up to the first end token and with it."""
    ends = [] if end is None else [end] if isinstance(end, int) else end
    ended = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype, device=tokens.device))
    return ((ended.long().cumsum(1) - ended.long()) == 0).sum(1)


def divergence(full: Sequence[Tensor], fast: Sequence[Tensor], lengths: Tensor) -> Tensor:
    """KL(full || fast) ``[B]`` in nats, the mean over the first ``lengths [B]`` steps of logits ``[B, V]``."""
    total = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
    for step, (a, b) in enumerate(zip(full, fast, strict=True)):
        p, q = a.float().log_softmax(-1), b.float().log_softmax(-1)
        terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).clamp(min=0.0)
        total += torch.where(step < lengths, terms, 0.0)
    return total / lengths
