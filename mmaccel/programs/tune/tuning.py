"""One call: samples in, a recipe and a report out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...accelerate import is_accelerated
from ...core.files import write_whole
from ...errors import MmaccelError
from ...recipe import Recipe, RecipeLike, TunedRecipe, get_recipe
from ...recipe import recipes as all_recipes
from ...suite import read_samples
from ..evaluate import Question, Row, ask_samples, evaluate
from ..identity import recipe_identity
from ..resume import naming_files, run_settings, usable
from . import report
from .baselines import best_of
from .evaluate import GOALS, Goal, Judge
from .journal import Journal
from .search import Search, Tuned, choose, front, split


def tune(
    model: Any,
    processor: Any,
    questions: str | Path | Sequence[Question],
    *,
    keep: float = 0.99,
    goal: Goal = "ttft",
    out: str | Path = "recipe.json",
    recipes: Sequence[RecipeLike] | None = None,
    confidence: float | None = None,
    trials: int = 300,
    minutes: float | None = None,
    measure: bool = False,
    batch_size: int = 16,
    max_new_tokens: int = 32,
    complain: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Tuned:
    """Search the recipe that spends least and keeps the model's answers.

    No expected answers are needed: an answer is kept if the model writes the same one, greedily, with the recipe. Recipes are
    taken from the registry by what works on this model and these samples, alone and combined, with their budgets, layers and
    options. The search is Optuna's (TPE, successive halving); after an interruption the same call goes on with it. What it
    finds has to beat every part alone at the same cost.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare.
    questions : a JSONL file as :func:`mmaccel.suite.read_samples` reads it, or questions of
        :func:`mmaccel.programs.evaluate.ask_samples`. Three in ten are held out for the final figure.
    keep : share of the answers that must be kept.
    goal : what is saved: ``ttft`` (operations of vision tower and prefill), ``tokens`` (visual tokens a layer), ``kv`` (bytes
        of the cache behind the prompt), ``cost`` (the mean of the shares of prefill operations and of bytes).
    out : the recipe's file; beside it a report (``.html``, ``.png``) and the journal of the search (``.journal``).
    recipes : what to search among, alone and together; by default all recipes there are.
    confidence : if given, such as 0.95, a recipe counts only if the held-out samples show with this confidence that it keeps
        enough; by default it must keep enough of those of the search.
    trials, minutes : how many recipes are tried, in all, and how long at most; by default without a limit.
    measure : ``ttft`` in measured seconds of prefill rather than operations.
    batch_size, max_new_tokens : as for :func:`mmaccel.programs.evaluate.evaluate`.
    complain : called with one sentence for every sample that cannot be used, which is then left out. Without it, that is an
        error.
    progress : called with what is being done, how much of it is done, and how much there is.

    Raises
    ------
    MmaccelError
        If samples are too few for the confidence, or cannot be read; the journal belongs to a run with other settings, is
        damaged, or in use by another run; or optuna is missing.

    Examples
    --------
    >>> from mmaccel.programs.evaluate import ask_suite
    >>> some = ask_suite(["existence"], 20)
    >>> found = tune(model, processor, some, keep=0.5, goal="tokens", recipes=["uniform"], trials=2, out=folder / "recipe.json")
    >>> model = accelerate_vlm(model, folder / "recipe.json")
    >>> model.mmaccel.remove()
    """
    _check(keep, goal, confidence, trials, out)
    tell = progress or (lambda what, done, of: None)
    if is_accelerated(model):
        raise MmaccelError("The search compares with the bare model; call model.mmaccel.remove() first.")
    offered = _offered(recipes) if recipes else all_recipes()
    with naming_files("give another file with --out (out=), or delete it"):
        given = _questions(questions, complain)
        readable = usable(processor, given, complain)
        rungs, held_out = split(readable, keep, confidence)
        settings = {
            **run_settings(model, processor, readable),
            "goal": goal,
            "keep": keep,
            "recipes": {name: _identity(one, model) for name, one in offered.items()},
            "measured": measure,
            "batch size": batch_size,
            "longest answer": max_new_tokens,
        }
        with Journal(Path(out).with_suffix(".journal"), settings) as journal:
            judge = Judge(
                model,
                processor,
                [*rungs, held_out],
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                measure=measure,
                complain=complain,
            )
            search = Search(judge, len(rungs), goal, keep, offered, journal, settings, tell)
            search.run(trials, minutes)
            return _finish(search, confidence, Path(out), len(given) - len(readable))


def _offered(recipes: Sequence[RecipeLike]) -> dict[str, Recipe]:
    """Recipes by name."""
    found: dict[str, Recipe] = {}
    for one in map(get_recipe, recipes):
        if found.setdefault(one.name, one) != one:
            raise MmaccelError(f"Two different recipes are called {one.name!r}; give one of them another name.")
    return found


def _identity(one: Recipe, model: Any) -> str:
    """The digest of a recipe, with the code of its methods; one that cannot be built is left out later, and says why."""
    try:
        return recipe_identity(one, getattr(model.config, "_name_or_path", None) or None)[:16]
    except MmaccelError as error:
        return str(error)


def _check(keep: float, goal: str, confidence: float | None, trials: int, out: str | Path) -> None:
    """See that what is asked makes sense."""
    if not 0 < keep <= 1:
        raise MmaccelError(f"keep={keep} is no share of answers; give one such as 0.99.")
    if goal not in GOALS:
        raise MmaccelError(f"goal={goal!r} is unknown; it can be {', '.join(GOALS)}.")
    if confidence is not None and not 0 < confidence < 1:
        raise MmaccelError(f"confidence={confidence} is none; give one such as 0.95.")
    if confidence is not None and keep == 1:
        raise MmaccelError(
            "No number of samples shows that every answer is kept; give a keep below 1, or no confidence."
        )
    if trials < 1:
        raise MmaccelError(f"trials={trials} is no number of recipes to try; give 1 or more.")
    if Path(out).suffix != ".json" or not Path(out).absolute().parent.is_dir():
        raise MmaccelError(f"{str(out)!r} must end in .json and lie in a folder that exists.")
    for path in map(Path(out).with_suffix, (".json", ".html", ".png")):
        if path.exists() and not path.is_file():
            raise MmaccelError(
                f"{str(path)!r} is no regular file, so it cannot be written; give another file with --out."
            )


def _questions(given: str | Path | Sequence[Question], complain: Callable[[str], None] | None) -> Sequence[Question]:
    """The questions of a file, or those that were given."""
    if not isinstance(given, (str, Path)):
        return given
    try:
        samples, complaints = read_samples(Path(given))
    except (OSError, ValueError) as error:
        raise MmaccelError(f"Cannot read the samples {str(given)!r}: {' '.join(str(error).split())}.") from error
    for complaint in complaints:
        if complain is None:
            raise MmaccelError(complaint)
        complain(complaint)
    return ask_samples(samples)


def _finish(search: Search, confidence: float | None, out: Path, left_out: int) -> Tuned:
    """Choose, look at what was held out, and write."""
    goal, keep, judge = search.goal, search.keep, search.judge
    candidates = search.candidates()
    whole = [one for one in candidates if one.asked_all]
    enough = [one for one in whole if one.measured.agreement >= keep and one.measured.share(goal) < 1]
    ordered = front(enough, goal, lambda m: -m.divergence)
    if ordered:
        ordered[0] = best_of(search, ordered[0])
    chosen, seen = choose(judge, search.rungs, ordered, keep, confidence)
    generated, recipe, figures = None, None, None
    if chosen is not None and seen is not None:
        row = Row(chosen.recipe)
        for _ in evaluate(
            judge.model,
            judge.processor,
            [question for exam in judge.exams(search.rungs) for question, _ in exam.batch],
            [row],
            batch_size=judge.batch_size,
            max_new_tokens=judge.longest,
        ):
            pass
        generated, figures = row.figures()["loyalty"], row.figures()
    told = report.figures(search, candidates, chosen, seen, figures, confidence)
    told["samples left out"] = left_out + judge.left_out
    if chosen is not None:
        recipe = TunedRecipe.of(chosen.recipe, out.stem, told["recipe"])
        write_whole(out, recipe.to_json().encode() + b"\n")
    tuned = Tuned(
        goal,
        keep,
        recipe,
        chosen,
        tuple(front(whole, goal, lambda m: m.agreement)),
        tuple(candidates),
        seen,
        generated,
        told,
    )
    report.write(tuned, out)
    return tuned
