"""Find a safety net for a recipe: how sure the model must be of an answer that it wrote with few tokens.

Every question is answered by the bare model and at a few budgets, and the certainty of each answer is noted. All ladders of
budgets, statistics and thresholds can then be compared without asking again: an answer is taken at the first budget at which it
is certain enough, else from the bare model. The cheapest choice that keeps enough answers is measured on held-out questions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from transformers import LogitsProcessorList

from ...accelerate import accelerated, is_accelerated
from ...accelerate.fallback import Certainty, Fallback, Statistic
from ...accelerate.tuned import fingerprint
from ...core.files import write_whole
from ...errors import MmaccelError
from ...families import family_of
from ...media.prepare import prepare
from ...method.model_options import KeepLoaded
from ...recipe import Recipe, RecipeLike, TunedRecipe, get_recipe
from ...runtime.tower.feature_cache import Remembered
from ..evaluate import Batch, Question, answer_lengths, batches, inputs_of, memory_error
from ..identity import recipe_identity
from ..resume import naming_files, run_settings, usable, without_unusable
from .confidence import interval, lower_bound
from .journal import Journal
from .search import split

#: budgets at which every question is answered
BUDGETS = (0.05, 0.1, 0.2, 0.4)
#: quantiles of the certainties of an answer's tokens that are tried
QUANTILES = (0.0, 0.1, 0.5)
#: budgets of a ladder at most, beside the bare model
_LONGEST = 3
#: statistics and quantiles by which certainty is judged
RULES = tuple(itertools.product(get_args(Statistic), QUANTILES))


@dataclass(frozen=True)
class Outcomes:
    """Answers of all questions at every budget.

    kept : ``[Q, budgets]`` bool, whether the answer is that of the bare model.
    cost : ``[Q, budgets]``, visual tokens a layer as a share of the bare model's.
    certainty : ``[Q, budgets, rules]``, by :data:`RULES`.
    """

    kept: Any
    cost: Any
    certainty: Any

    @staticmethod
    def of(rows: Sequence[dict[str, Any]]) -> Outcomes:
        """From plain data, one entry a question."""
        return Outcomes(*(np.array([row[name] for row in rows]) for name in ("kept", "cost", "certainty")))

    def replay(self, ladder: Sequence[int], rule: int, threshold: float) -> tuple[Any, Any, Any]:
        """The answers of all questions with a ladder of budgets (columns) and a threshold.

        Returns, ``[Q]`` each: whether the answer is kept, the tokens read (a share of the bare model's), and the number of the
        reading that it comes from.
        """
        columns = list(ladder)
        sure = self.certainty[:, columns, rule] >= threshold
        reading = np.where(sure.any(1), sure.argmax(1), len(columns))
        kept = np.concatenate([self.kept[:, columns], np.ones((len(sure), 1), bool)], 1)
        spent = np.cumsum(np.concatenate([self.cost[:, columns], np.ones((len(sure), 1))], 1), 1)
        rows = np.arange(len(sure))
        return kept[rows, reading], spent[rows, reading], reading

    def least(self) -> float:
        """Tokens that a judge who knows the bare model's answers reads, with the best ladder: no certainty does better."""
        costs = []
        for ladder in _ladders(self.kept.shape[1]):
            known = Outcomes(self.kept, self.cost, self.kept[..., None])
            costs.append(float(known.replay(ladder, 0, 1.0)[1].mean()))
        return min(costs)


@dataclass(frozen=True)
class FoundFallback:
    """A calibrated safety net.

    recipe : the recipe at its first budget, with the fallback in ``tuned``; None if no choice keeps enough and saves tokens.
    report : figures as plain data: of the questions it was chosen on, and of those held out.
    """

    recipe: TunedRecipe | None
    fallback: Fallback | None
    report: dict[str, Any]


def find_fallback(
    model: Any,
    processor: Any,
    questions: Sequence[Question],
    recipe: RecipeLike = "balanced",
    *,
    keep: float = 0.99,
    confidence: float | None = None,
    budgets: Sequence[float] = BUDGETS,
    out: str | Path = "recipe.json",
    batch_size: int = 16,
    max_new_tokens: int = 32,
    complain: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> FoundFallback:
    """Find the ladder of budgets and the threshold with which a recipe keeps the model's answers at the fewest tokens.

    No expected answers are needed. The same call resumes an interrupted one.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare.
    questions : as :func:`mmaccel.programs.evaluate.ask_samples` makes them. Three in ten are held out.
    keep : share of the answers that must be kept.
    confidence : if given, such as 0.95, the share is reached with this confidence on the questions of the choice, and the
        held-out ones are as many as can show it.
    budgets : shares of the visual tokens that are tried.
    out : file of the recipe; beside it the journal (``.journal``).
    complain, progress : as for :func:`mmaccel.tune`.

    Raises
    ------
    MmaccelError
        If a value is not allowed, the recipe drops no tokens before or inside the language model, samples are too few, or the
        journal belongs to another run.
    """
    base = get_recipe(recipe)
    steps = _check(model, base, keep, confidence, budgets, Path(out))
    tell = progress or (lambda what, done, of: None)
    with naming_files("give another file with --out (out=), or delete it"):
        readable = usable(processor, questions, complain)
        rungs, held_out = split(readable, keep, confidence)
        asked = [one for rung in rungs for one in rung]
        settings = {
            **run_settings(model, processor, readable),
            "fallback of": recipe_identity(base, getattr(model.config, "_name_or_path", None) or None)[:16],
            "budgets": list(budgets),
            "batch size": batch_size,
            "longest answer": max_new_tokens,
        }
        with Journal(Path(out).with_suffix(".journal"), settings) as journal, KeepLoaded(), memory_error():
            known = {tuple(log["part"]): log["rows"] for log in journal.read_logs(0)}
            outcomes = []
            total = len(asked) + len(held_out)
            for part, some in (("choice", asked), ("held out", held_out)):
                rows: list[dict[str, Any]] = []
                for number, batch in enumerate(batches(some, batch_size, complain)):
                    at = (part, number)
                    if at not in known:
                        known[at] = _answered(model, processor, batch, steps, max_new_tokens, complain)
                        journal.append_logs([{"part": at, "rows": known[at]}])
                    rows += known[at]
                    tell("answering", len(rows) + (len(asked) if part == "held out" else 0), total)
                if not rows:
                    raise MmaccelError(f"None of {len(some)} questions can be used; give others.")
                outcomes.append(Outcomes.of(rows))
    return _finish(model, base, steps, outcomes[0], outcomes[1], keep, confidence, Path(out))


def _check(
    model: Any, base: Recipe, keep: float, confidence: float | None, budgets: Sequence[float], out: Path
) -> list[Recipe]:
    """The recipe at every budget. Raises MmaccelError for what is not allowed."""
    if is_accelerated(model):
        raise MmaccelError("The fallback compares with the bare model; call model.mmaccel.remove() first.")
    if not 0 < keep < 1:
        raise MmaccelError(f"keep must be a share of the answers such as 0.99, below 1, got {keep}.")
    if confidence is not None and not 0 < confidence < 1:
        raise MmaccelError(f"confidence must be greater than 0 and less than 1, such as 0.95, got {confidence}.")
    if base.primary is None or base.stages[base.primary].kind.site not in ("encoder", "projector", "layers"):
        raise MmaccelError(
            f"A fallback saves visual tokens that are read, and recipe {base.name!r} has no budget for them; give a recipe "
            "that drops tokens before or inside the language model, such as balanced."
        )
    if not budgets or list(budgets) != sorted(set(budgets)) or not all(0 < one < 1 for one in budgets):
        raise MmaccelError(f"budgets must be rising shares between 0 and 1, such as 0.1 0.3, got {list(budgets)}.")
    if out.suffix != ".json" or not out.absolute().parent.is_dir():
        raise MmaccelError(f"{str(out)!r} must end in .json and lie in a folder that exists.")
    return [base.override(retain=float(budget)) for budget in budgets]


@torch.inference_mode()
def _answered(
    model: Any,
    processor: Any,
    batch: Batch,
    steps: Sequence[Recipe],
    longest: int,
    complain: Callable[[str], None] | None,
) -> list[dict[str, Any]]:
    """The outcomes of a batch, one entry for every question that can be used."""

    def run(part: Batch) -> list[dict[str, Any]]:
        inputs, memory = inputs_of(model, processor, part), Remembered()
        rows: list[dict[str, Any]] = [{"kept": [], "cost": [], "certainty": []} for _ in part]
        with memory.on(family_of(model, processor)):
            full, whole, _ = _generate(model, processor, get_recipe("none"), inputs, longest)
            for step in steps:
                answers, tokens, certain = _generate(model, prepare(processor, step), step, inputs, longest)
                for row, mine, theirs, values in zip(rows, answers, full, certain, strict=True):
                    row["kept"].append(mine == theirs)
                    row["cost"].append(tokens / whole)
                    row["certainty"].append(values)
        return rows

    return without_unusable(batch, run, complain)[1] or []


def _generate(
    model: Any, processor: Any, recipe: Recipe, inputs: dict[str, Any], longest: int
) -> tuple[list[list[int]], float, Iterator[list[float]]]:
    """Tokens of every answer, visual tokens a layer, and of every answer the certainties by :data:`RULES`."""
    rules = [Fallback(1.0, *rule) for rule in RULES]
    notes = [Certainty(Fallback(1.0, statistic)) for statistic in get_args(Statistic)]
    with accelerated(model, recipe, processor=processor):
        out = model.generate(
            **inputs, max_new_tokens=longest, do_sample=False, num_beams=1, logits_processor=LogitsProcessorList(notes)
        )
        read = float(model.mmaccel.stats().visual_tokens_per_layer)
    tokens = out[:, inputs["input_ids"].shape[1] :]
    lengths = answer_lengths(tokens, model.generation_config.eos_token_id).tolist()
    steps = {note.fallback.statistic: note.steps for note in notes}
    certain = [rule.of_answers(steps[rule.statistic], lengths) for rule in rules]
    answers = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
    return answers, read, map(list, zip(*certain, strict=True))


def verdict(found: FoundFallback) -> str:
    """The result in a few sentences."""
    report = found.report
    alone = ", ".join(f"{one['kept']:.1%} at {one['retain']:.0%}" for one in report["alone"])
    lines = [
        f"{report['recipe']} alone keeps {alone} of the tokens; a judge that knew the bare model's answers would read "
        f"{report['tokens of a perfect judge']:.1%} of them."
    ]
    if found.fallback is None:
        return f"{lines[0]}\nNo fallback keeps {report['keep']:.1%} of the answers and reads fewer tokens than the bare model."
    for name, what in (("chosen", "the questions it was chosen on"), ("held out", "held-out questions")):
        part = report[name]
        low, high = part["interval"]
        lines.append(
            f"With the fallback, of {part['questions']} {what}: {part['kept']:.1%} of the answers kept (95 % interval "
            f"{low:.1%} to {high:.1%}), {part['tokens read']:.1%} of the tokens read; answers by reading: "
            f"{', '.join(map(str, part['answers by reading']))}."
        )
    if not report["held out keeps enough"]:
        how = f" with confidence {report['confidence']:g}" if report["confidence"] else ""
        lines.append(
            f"WARNING: {report['keep']:.1%} of the answers were to be kept{how}, and the held-out ones do not show it; give "
            "more samples, or a higher --keep."
        )
    return "\n".join(lines)


def _enough(kept: Any, keep: float, confidence: float | None) -> bool:
    """Whether so many answers are kept, with the confidence if there is one."""
    share = lower_bound(int(kept.sum()), len(kept), confidence) if confidence else kept.mean()
    return bool(share >= keep)


def _ladders(budgets: int) -> list[tuple[int, ...]]:
    """All ladders of so many budgets."""
    return [one for length in range(1, _LONGEST + 1) for one in itertools.combinations(range(budgets), length)]


def cheapest(
    outcomes: Outcomes, keep: float, confidence: float | None
) -> tuple[float, tuple[int, ...], int, float] | None:
    """The cheapest choice that keeps enough: its mean cost, ladder (columns), rule and threshold; None if none saves tokens."""
    best: tuple[float, tuple[int, ...], int, float] | None = None
    for ladder, rule in itertools.product(_ladders(outcomes.kept.shape[1]), range(len(RULES))):
        # the threshold may be any certainty that was seen: between two of them nothing changes
        seen = np.unique(outcomes.certainty[:, list(ladder), rule])
        low, high = 0, len(seen)
        # more answers are kept the higher it is, nearly always; the lowest that keeps enough is the cheapest
        while low < high:
            middle = (low + high) // 2
            if _enough(outcomes.replay(ladder, rule, seen[middle])[0], keep, confidence):
                high = middle
            else:
                low = middle + 1
        if low == len(seen) or seen[low] <= 0:
            continue
        kept, spent, _ = outcomes.replay(ladder, rule, seen[low])
        cost = float(spent.mean())
        if cost < 1 and _enough(kept, keep, confidence) and (best is None or cost < best[0]):
            # half way to the next lower one, so that rounding of another batch changes nothing
            best = cost, ladder, rule, float(seen[max(0, low - 1)] + seen[low]) / 2
    return best


def _finish(
    model: Any,
    base: Recipe,
    steps: Sequence[Recipe],
    asked: Outcomes,
    held: Outcomes,
    keep: float,
    confidence: float | None,
    out: Path,
) -> FoundFallback:
    """Choose, measure on held-out questions, and write the recipe."""
    report: dict[str, Any] = {"recipe": base.name, "keep": keep, "confidence": confidence}
    report["alone"] = [
        {"retain": step.retain, "kept": float(asked.kept[:, at].mean()), "cost": float(asked.cost[:, at].mean())}
        for at, step in enumerate(steps)
    ]
    report["tokens of a perfect judge"] = asked.least()
    best = cheapest(asked, keep, confidence)
    if best is None:
        return FoundFallback(None, None, {**report, "chosen": None})
    _, ladder, rule, threshold = best
    statistic, quantile = RULES[rule]
    first, *others = (steps[at] for at in ladder)
    fallback = Fallback(threshold, statistic, quantile, tuple(one.retain for one in others if one.retain is not None))
    for name, part in (("chosen", asked), ("held out", held)):
        kept, spent, reading = part.replay(ladder, rule, threshold)
        report[name] = {
            "questions": len(kept),
            "kept": float(kept.mean()),
            "interval": list(interval(int(kept.sum()), len(kept))),
            "tokens read": float(spent.mean()),
            "answers by reading": np.bincount(reading, minlength=len(ladder) + 1).tolist(),
        }
    report["held out keeps enough"] = _enough(held.replay(ladder, rule, threshold)[0], keep, confidence)
    plain = dataclasses.asdict(fallback) | {"budgets": list(fallback.budgets)}
    recipe = TunedRecipe.of(first, out.stem, {"model": fingerprint(model), "fallback": plain, "measured": report})
    write_whole(out, recipe.to_json().encode() + b"\n")
    return FoundFallback(recipe, fallback, {**report, "fallback": plain})
