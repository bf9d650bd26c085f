"""Find the layers that a model skips while it drafts for itself.

The bare model answers some questions. A set of layers is judged by these answers: without the layers the model reads an
answer in one forward, behind keys of the prompt that all layers have made, and the share of tokens for which the likeliest
next token is the right one is the acceptance of drafts (SWIFT's match rate). Acceptance and the measured seconds of forwards
say how many times as fast decoding would be. Layers are added one by one, always the one that costs least acceptance; the set
that promises most drafts for held-out questions in the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...accelerate import accelerated, is_accelerated
from ...accelerate.drafting import Drafts, skippable
from ...accelerate.tuned import fingerprint
from ...core.files import write_whole
from ...errors import MmaccelError
from ...families import Family, family_of
from ...recipe import Recipe, RecipeLike, TunedRecipe, get_recipe
from ...runtime.decoding.drafting import LONGEST
from ...runtime.decoding.layer_skip import likeliest_without
from ...runtime.decoding.length import Acceptance, Costs, best_length
from ...runtime.decoding.model_draft import ModelDraft
from ...runtime.decoding.rows import Chooser, Row
from ..drafts import drafting_sums
from ..evaluate import Batch, Question, answer_lengths, batches, inputs_of, memory_error
from ..identity import recipe_identity
from ..resume import naming_files, run_settings, usable, without_unusable
from .journal import Journal
from .search import split

#: questions at most whose prompts stay in memory while layers are tried, and held-out ones that are answered with drafts
QUESTIONS = 32
#: lengths of the forwards whose seconds are measured, and how often each is run
LENGTHS, ROUNDS = (1, 2, 4, 8, 16), 7


@dataclass(frozen=True)
class FoundLayers:
    """The layers that were found.

    recipe : the recipe with the layers in ``tuned``; None if no layers pay.
    layers : their numbers, rising.
    report : figures as plain data.
    """

    recipe: TunedRecipe | None
    layers: tuple[int, ...]
    report: dict[str, Any]


def find_draft_layers(
    model: Any,
    processor: Any,
    questions: Sequence[Question],
    recipe: RecipeLike = "none",
    *,
    out: str | Path = "recipe.json",
    trials: int = 300,
    minutes: float | None = None,
    batch_size: int = 16,
    max_new_tokens: int = 32,
    complain: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> FoundLayers:
    """Find the layers without which a model drafts so well for itself that lossless decoding gains most.

    No expected answers are needed. The same call resumes an interrupted one.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare.
    questions : as :func:`mmaccel.programs.evaluate.ask_samples` makes them. Three in ten are held out.
    recipe : the recipe that the layers are written into; it does not shape these drafts.
    out : file of the recipe; beside it the journal (``.journal``).
    trials, minutes : how many sets of layers are tried, in all, and how long at most; by default without a limit.
    batch_size, max_new_tokens : questions that are answered at once, and the longest answer.
    complain, progress : as for :func:`mmaccel.tune`.

    Raises
    ------
    MmaccelError
        If a value is not allowed, the model has no layers to skip, samples are too few, answers are too short, or the journal
        belongs to another run.
    """
    base, family = get_recipe(recipe), family_of(model, processor)
    _check(model, family, processor, base, trials, minutes, Path(out))
    tell = progress or (lambda what, done, of: None)
    with naming_files("give another file with --out (out=), or delete it"):
        readable = usable(processor, questions, complain)
        rungs, held_out = split(readable, 0.0, None)
        settings = {
            **run_settings(model, processor, readable),
            "draft layers of": recipe_identity(base, getattr(model.config, "_name_or_path", None) or None)[:16],
            "batch size": batch_size,
            "longest answer": max_new_tokens,
        }
        with Journal(Path(out).with_suffix(".journal"), settings) as journal, memory_error():
            asked = [question for rung in rungs for question in rung][:QUESTIONS]
            answers = _Answers(model, processor, asked, batch_size, max_new_tokens, complain)
            search = _Search(family, answers, journal, tell)
            layers = search.run(trials, minutes)
            report = {
                "recipe": base.name,
                "questions": len(asked),
                "sets tried": len(search.known),
                **search.report(layers),
            }
            if not layers:
                return FoundLayers(None, (), report)
            rows = _drafted(
                model, processor, base, layers, held_out[:QUESTIONS], max_new_tokens, journal, complain, tell
            )
    report["held out"] = _sums(rows)
    recipe_of_model = isinstance(base, TunedRecipe) and base.tuned.get("model") == fingerprint(model)
    tuned = dict(base.tuned) if isinstance(base, TunedRecipe) and recipe_of_model else {"model": fingerprint(model)}
    # a recipe without stages has one name
    name = Path(out).stem if base.stages else base.name
    found = TunedRecipe.of(base, name, {**tuned, "draft": {"layers": list(layers), "measured": report}})
    write_whole(Path(out), found.to_json().encode() + b"\n")
    return FoundLayers(found, layers, report)


def _check(
    model: Any, family: Family, processor: Any, base: Recipe, trials: int, minutes: float | None, out: Path
) -> None:
    """Raise MmaccelError for what is not allowed."""
    if is_accelerated(model):
        raise MmaccelError("Layers are tried on the bare model; call model.mmaccel.remove() first.")
    allowed = list(skippable(family))
    if not allowed:
        raise MmaccelError(
            f"This {family.name} model has no layer that can be skipped: the first one of each kind has to stay."
        )
    Drafts(True, allowed[:1], False).check(base, processor, falls_back=False)
    if trials < 1:
        raise MmaccelError(f"trials must be at least 1, got {trials}.")
    if minutes is not None and minutes < 0:
        raise MmaccelError(f"minutes must be at least 0, got {minutes}.")
    if out.suffix != ".json" or not out.absolute().parent.is_dir():
        raise MmaccelError(f"{str(out)!r} must end in .json and lie in a folder that exists.")


class _Answers:
    """Answers of the bare model, and the prompts before them, which it has read; made when they are needed first."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        questions: Sequence[Question],
        batch_size: int,
        longest: int,
        complain: Callable[[str], None] | None,
    ) -> None:
        self.model, self.processor, self.questions = model, processor, questions
        self.batch_size, self.longest, self.complain = batch_size, longest, complain
        #: a prompt, its answers ``[B, T]`` and how many tokens each has ``[B]``; of the first question alone the prompt
        self.parts: list[tuple[ModelDraft, Tensor, Tensor]] = []
        self.first: ModelDraft | None = None

    def make(self, tell: Callable[[str, int, int], None]) -> None:
        """Answer the questions, unless they are answered."""
        done = 0
        for batch in () if self.parts else batches(self.questions, self.batch_size, self.complain):
            used, part = without_unusable(batch, self._answered, self.complain)
            if part is not None:
                self.parts.append(part)
                self.first = self.first or self._read(used[:1])[0]
            done += len(batch)
            tell("answering", done, len(self.questions))
        if not any(bool((lengths > 1).any()) for _, _, lengths in self.parts):
            raise MmaccelError(
                "No answer has a second token, so that there is nothing to draft; ask for longer answers "
                "(--max-new-tokens), or give other questions."
            )

    def matches(self, layers: Sequence[Any]) -> tuple[int, int]:
        """For how many tokens of all answers the likeliest next one is right if ``layers`` are skipped, and of how many."""
        right = tested = 0
        for prompt, tokens, lengths in self.parts:
            if tokens.shape[1] == 1:
                continue
            following = torch.tensor(likeliest_without(layers, prompt, tokens[:, :-1]))
            real = torch.arange(1, tokens.shape[1]) < lengths[:, None]
            right += int(((following == tokens[:, 1:].cpu()) & real).sum())
            tested += int(real.sum())
        return right, tested

    def _answered(self, batch: Batch) -> tuple[ModelDraft, Tensor, Tensor]:
        prompt, inputs = self._read(batch)
        out = _generate(self.model, inputs, self.longest)
        tokens = out[:, inputs["input_ids"].shape[1] :]
        return prompt, tokens, answer_lengths(tokens, self.model.generation_config.eos_token_id).cpu()

    def _read(self, batch: Batch) -> tuple[ModelDraft, dict[str, Any]]:
        """A prompt that the model has read, and the arguments that describe it."""
        inputs = inputs_of(self.model, self.processor, batch)
        prompt = ModelDraft("answers", self.model, inputs, {}, self.longest)
        rows = [Row(ids, len(ids)) for ids in inputs["input_ids"].tolist()]
        prompt.prepare(rows, Chooser([], self.model.generation_config))
        return prompt, inputs


class _Search:
    """Sets of layers and what they promise; what earlier runs have measured is in the journal."""

    def __init__(
        self, family: Family, answers: _Answers, journal: Journal, tell: Callable[[str, int, int], None]
    ) -> None:
        self.kinds, self.layers = skippable(family), list(family.text.layers)
        self.answers, self.journal, self.tell = answers, journal, tell
        logs = journal.read_logs(0)
        #: right and tested tokens by the layers that were skipped
        self.known = {tuple(log["layers"]): (log["right"], log["tested"]) for log in logs if "layers" in log}
        self.seconds: Mapping[str, Any] | None = next((log["seconds"] for log in logs if "seconds" in log), None)
        self.costs = Costs()

    def run(self, trials: int, minutes: float | None) -> tuple[int, ...]:
        """The layers that promise most; none if none promise more than plain decoding."""
        if self.seconds is None:
            self.answers.make(self.tell)
            self.seconds = self._measured()
            self.journal.append_logs([{"seconds": self.seconds}])
        for length, seconds in self.seconds["forward"].items():
            self.costs.add(int(length), seconds)
        end = None if minutes is None else time.monotonic() + 60 * minutes
        chosen, best, gain = list[int](), tuple[int, ...](), 1.0
        # the acceptance that skipping each layer left when it was tried last
        left = dict.fromkeys(self.kinds, 1.0)
        # what the fastest draft would gain with the acceptance that is left
        while left and self._gain(self.rate(chosen) if chosen else 1.0, list(self.kinds))[1] > gain:
            tried: dict[int, float] = {}
            for layer in sorted(left, key=lambda one: -left[one]):
                # the more layers are skipped, the less is left
                if tried and max(tried.values()) >= left[layer]:
                    break
                skipped = tuple(sorted((*chosen, layer)))
                if skipped not in self.known and (
                    len(self.known) >= trials or (end is not None and time.monotonic() > end)
                ):
                    return best
                tried[layer] = left[layer] = self.rate(skipped)
                self.tell("trying layers", min(len(self.known), trials), trials)
            chosen.append(max(tried, key=lambda one: tried[one]))
            del left[chosen[-1]]
            if (promised := self._gain(tried[chosen[-1]], chosen)[1]) > gain:
                best, gain = tuple(sorted(chosen)), promised
        return best

    def rate(self, layers: Sequence[int]) -> float:
        """The acceptance of drafts without these layers."""
        key = tuple(sorted(layers))
        if key not in self.known:
            self.answers.make(self.tell)
            right, tested = self.known[key] = self.answers.matches([self.layers[one] for one in key])
            self.journal.append_logs([{"layers": key, "right": right, "tested": tested}])
        right, tested = self.known[key]
        acceptance = Acceptance()
        acceptance.add(right, tested - right)
        return acceptance.rate

    def _price(self, layers: Sequence[int]) -> float:
        """Seconds of a draft step."""
        assert self.seconds is not None
        saved = sum(self.seconds["layer"][self.kinds[layer]] for layer in layers)
        return max(float(self.costs.seconds(1)) - saved, 0.0)

    def _gain(self, rate: float, layers: Sequence[int]) -> tuple[int, float]:
        """The draft length that pays most, and how many times as fast decoding would be."""
        return best_length(rate, self._price(layers), self.costs, LONGEST)

    def report(self, layers: Sequence[int]) -> dict[str, Any]:
        """Figures of a set of layers, as plain data."""
        if not layers:
            return {"layers": [], "promised": 1.0}
        (right, tested), rate = self.known[tuple(layers)], self.rate(layers)
        length, promised = self._gain(rate, layers)
        return {
            "layers": list(layers),
            "acceptance": right / tested,
            "tested tokens": tested,
            "draft step": self._price(layers) / self.costs.seconds(1),
            "draft length": length,
            "promised": promised,
        }

    def _measured(self) -> dict[str, dict[str, float]]:
        """Seconds of a ``forward`` over so many tokens, and what skipping one ``layer`` of a kind saves of one over a single
        token: medians behind the prompt of one question."""
        assert self.answers.first is not None
        first, token = self.answers.first, self.answers.parts[0][1][:1, :1]
        kinds = {kind: [layer for layer, own in self.kinds.items() if own == kind] for kind in self.kinds.values()}
        runs: dict[Any, tuple[list[int], int]] = {length: ([], length) for length in LENGTHS}
        runs |= {kind: (layers, 1) for kind, layers in kinds.items()}
        spent: dict[Any, list[float]] = {name: [] for name in runs}
        # the first round is not counted: it loads what later ones have
        for number in range(ROUNDS + 1):
            for name, (layers, length) in runs.items():
                begin = time.perf_counter()
                likeliest_without([self.layers[one] for one in layers], first, token.expand(-1, length))
                if number:
                    spent[name].append(time.perf_counter() - begin)
        median = {name: statistics.median(seconds) for name, seconds in spent.items()}
        saved = {kind: max(0.0, median[1] - median[kind]) / len(layers) for kind, layers in kinds.items()}
        return {"forward": {str(length): median[length] for length in LENGTHS}, "layer": saved}


def _generate(model: Any, inputs: Mapping[str, Any], longest: int, **options: Any) -> Tensor:
    """The ids of prompts and greedy answers ``[B, S + T]``."""
    with torch.no_grad():
        ids: Tensor = model.generate(**inputs, max_new_tokens=longest, do_sample=False, num_beams=1, **options)
    return ids


def _drafted(
    model: Any,
    processor: Any,
    base: Recipe,
    layers: tuple[int, ...],
    questions: Sequence[Question],
    longest: int,
    journal: Journal,
    complain: Callable[[str], None] | None,
    tell: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """Figures of every held-out question, answered alone by the bare model and then with drafts."""
    known = {log["question"]: log for log in journal.read_logs(0) if log.get("draft") == list(layers)}
    rows = []

    def run(batch: Batch) -> dict[str, Any]:
        inputs, seconds, answers = inputs_of(model, processor, batch), list[float](), list[list[int]]()
        for asked in (False, None):
            begin = time.perf_counter()
            answers.append(_generate(model, inputs, longest, mmaccel=asked)[0].tolist())
            seconds.append(time.perf_counter() - begin)
        sums = drafting_sums(model.mmaccel.stats())
        return {"bare": seconds[0], "drafted": seconds[1], "same": answers[0] == answers[1], "sums": sums}

    with accelerated(model, base, processor=processor, lossless=True, draft=list(layers)):
        for number, question in enumerate(questions):
            if number not in known:
                for batch in batches([question], 1, complain):
                    if (figures := without_unusable(batch, run, complain)[1]) is not None:
                        known[number] = {"draft": list(layers), "question": number, **figures}
                        journal.append_logs([known[number]])
            rows += [known[number]] if number in known else []
            tell("answering with drafts", number + 1, len(questions))
    return rows


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of all held-out questions, as plain data."""
    if not rows:
        raise MmaccelError("None of the held-out questions can be used; give others.")
    return {
        "questions": len(rows),
        "same answers": sum(row["same"] for row in rows),
        "drafted": round(sum(row["sums"]["drafted"] for row in rows)),
        "accepted": round(sum(row["sums"]["accepted"] for row in rows)),
        "times as fast": sum(row["bare"] for row in rows) / sum(row["drafted"] for row in rows),
    }


def verdict(found: FoundLayers) -> str:
    """The result in a few sentences."""
    report = found.report
    tried = f"{report['sets tried']} sets of layers tried on {report['questions']} questions"
    if found.recipe is None:
        return (
            f"{tried}: no layers can be skipped so that drafts pay; without them the model decodes as fast as it can."
        )
    held = report["held out"]
    lines = [
        f"{tried}. Without layers {', '.join(map(str, found.layers))} a draft step costs {report['draft step']:.0%} of a step, "
        f"and {report['acceptance']:.1%} of {report['tested tokens']} drafted tokens are right: drafts of "
        f"{report['draft length']} promise {report['promised']:.2f} times the speed of decoding.",
        f"On {held['questions']} held-out questions: {held['accepted']} of {held['drafted']} drafted tokens accepted, "
        f"{held['same answers']} answers the same, {held['times as fast']:.2f} times as fast with the prompt.",
    ]
    if held["times as fast"] < 1:
        lines.append(
            "WARNING: the held-out questions were answered more slowly with drafts than without; give more questions and "
            "longer answers (--max-new-tokens), or leave out lossless."
        )
    return "\n".join(lines)
