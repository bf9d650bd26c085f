"""Search for a recipe with given samples."""

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
from ..plots import load_pyplot
from ..resume import naming_files, run_settings, usable
from . import report
from .baselines import best_of
from .evaluate import GOALS, Evaluator, Goal
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
    """Search for the cheapest recipe that keeps the model's answers.

    No expected answers are needed: an answer is kept if the model writes the same one, greedily, with the recipe. The search
    (Optuna's TPE with successive halving) tries all recipes that work on this model and these samples, alone and combined, with
    their budgets, layers and options; the result also beats every method alone at the same cost. The same call resumes an
    interrupted search.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare.
    questions : a JSONL file as :func:`mmaccel.suite.read_samples` reads it, or questions of
        :func:`mmaccel.programs.evaluate.ask_samples`. Three in ten are held out for the final figure.
    keep : share of the answers that must be kept.
    goal : what is saved: ``ttft`` (operations of vision tower and prefill), ``tokens`` (visual tokens a layer), ``kv`` (bytes
        of the cache after the prompt), ``cost`` (the mean of the shares of prefill operations and of bytes).
    out : the recipe's file; next to it a report (``.html``, ``.png``) and the journal of the search (``.journal``).
    recipes : what to search among, alone and combined; by default all recipes.
    confidence : if given, such as 0.95, accept only recipes that reach ``keep`` with this confidence on the held-out samples.
    trials, minutes : how many recipes are tried, in all, and how long at most; by default without a limit.
    measure : ``ttft`` in measured seconds of prefill rather than operations.
    batch_size, max_new_tokens : as for :func:`mmaccel.programs.evaluate.evaluate`.
    complain : called with one sentence for every sample that cannot be used and is left out. Without it, that is an error.
    progress : called with the name of a part of the work, how much of it is done, and how much there is.

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
            evaluator = Evaluator(
                model,
                processor,
                [*rungs, held_out],
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                timed=measure,
                complain=complain,
            )
            search = Search(evaluator, len(rungs), goal, keep, offered, journal, settings, tell)
            search.run(trials, minutes)
            return _finish(search, confidence, Path(out), len(given) - len(readable))


def _offered(recipes: Sequence[RecipeLike]) -> dict[str, Recipe]:
    by_name: dict[str, Recipe] = {}
    for one in map(get_recipe, recipes):
        one.to_json()  # raises for what cannot be written in the end
        if by_name.setdefault(one.name, one) != one:
            raise MmaccelError(f"Two different recipes are called {one.name!r}; give one of them another name.")
    return by_name


def _identity(one: Recipe, model: Any) -> str:
    """The digest of a recipe with the code of its methods, or why it cannot be built."""
    try:
        return recipe_identity(one, getattr(model.config, "_name_or_path", None) or None)[:16]
    except MmaccelError as error:
        return str(error)


def _check(keep: float, goal: str, confidence: float | None, trials: int, out: str | Path) -> None:
    load_pyplot("tune")  # which the end of the search needs
    if not 0 < keep <= 1:
        raise MmaccelError(f"keep must be a share of the answers such as 0.99, got {keep}.")
    if goal not in GOALS:
        raise MmaccelError(f"goal must be one of {', '.join(GOALS)}, got {goal!r}.")
    if confidence is not None and not 0 < confidence < 1:
        raise MmaccelError(f"confidence must be greater than 0 and less than 1, such as 0.95, got {confidence}.")
    if confidence is not None and keep == 1:
        raise MmaccelError(
            "No number of samples can show that every answer is kept; give a keep below 1, or no confidence."
        )
    if trials < 1:
        raise MmaccelError(f"trials must be at least 1, got {trials}.")
    if Path(out).suffix != ".json" or not Path(out).absolute().parent.is_dir():
        raise MmaccelError(f"{str(out)!r} must end in .json and lie in a folder that exists.")
    for path in map(Path(out).with_suffix, (".json", ".html", ".png")):
        if path.exists() and not path.is_file():
            raise MmaccelError(
                f"{str(path)!r} is no regular file, so it cannot be written; give another file with --out."
            )


def _questions(given: str | Path | Sequence[Question], complain: Callable[[str], None] | None) -> Sequence[Question]:
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
    """Choose a recipe, evaluate it on the held-out questions, and write it."""
    goal, keep, evaluator = search.goal, search.keep, search.evaluator
    candidates = search.candidates()
    whole = [one for one in candidates if one.asked_all]
    enough = [one for one in whole if one.measured.agreement >= keep and one.measured.share(goal) < 1]
    ordered = front(enough, goal, lambda m: -m.divergence)
    if ordered:
        ordered[0] = best_of(search, ordered[0])
    chosen, seen = choose(evaluator, search.rungs, ordered, keep, confidence)
    generated, recipe, figures = None, None, None
    if chosen is not None and seen is not None:
        row = Row(chosen.recipe)
        for _ in evaluate(
            evaluator.model,
            evaluator.processor,
            [question for one in evaluator.answered(search.rungs) for question, _ in one.batch],
            [row],
            batch_size=evaluator.batch_size,
            max_new_tokens=evaluator.longest,
        ):
            pass
        figures = row.figures()
        generated = figures["loyalty"]
    data = report.figures(search, candidates, chosen, seen, figures, confidence)
    data["samples left out"] = left_out + evaluator.left_out
    if chosen is not None:
        recipe = TunedRecipe.of(chosen.recipe, out.stem, data["recipe"])
        write_whole(out, recipe.to_json().encode() + b"\n")
    best = tuple(front(whole, goal, lambda m: m.agreement))
    tuned = Tuned(goal, keep, recipe, chosen, best, tuple(candidates), seen, generated, data)
    report.write(tuned, out)
    return tuned
