"""The search: a resumable Optuna study whose trials are recipes, and the choice among them."""

from __future__ import annotations

import contextlib
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import MmaccelError
from ...recipe import Recipe, TunedRecipe
from ..evaluate import Question
from .confidence import lower_bound, samples_needed
from .evaluate import Evaluator, Goal, Measurement
from .journal import Journal
from .space import Space

if TYPE_CHECKING:
    import optuna

#: share of the samples that the search never sees
HELD_OUT = 0.3
#: samples that a search needs at least
FEWEST = 10
#: one in so many recipes of a rung reaches the next one
HALVING = 3
#: questions of the first rung, at least and at most
_FIRST = (4, 16)
#: the cost of losing all answers, in shares of what the bare model spends, and how many questions the risk counts as
_LOST, _GUESSED = 10.0, 8
#: one trial in so many is Optuna's; the others are neighbours of one of so many best trials with different parts
_OPEN, _BEST = 4, 8
#: the budget of the first trials, each of a single part
_START = 0.5
#: names of measurements in the journal begin so
_ASKED = "asked "


@dataclass(frozen=True)
class Candidate:
    """A recipe and its measurement on the rungs that it reached."""

    recipe: Recipe
    measured: Measurement
    asked_all: bool


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    recipe : the cheapest one that keeps enough; None if there is none.
    front : the Pareto front of cost and kept answers, from the cheapest recipe on.
    held_out : the recipe on the held-out questions; None without a recipe. ``generated`` is the share of answers that were the
        same when they were generated token by token.
    report : all figures as plain data.
    """

    goal: Goal
    keep: float
    recipe: TunedRecipe | None
    chosen: Candidate | None
    front: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    held_out: Measurement | None
    generated: float | None
    report: Mapping[str, Any]

    @property
    def share(self) -> float | None:
        """The cost of the recipe as a share of the bare model's, on the questions of the search."""
        return None if self.chosen is None else self.chosen.measured.share(self.goal)


def split(
    questions: Sequence[Question], keep: float, confidence: float | None
) -> tuple[list[list[Question]], list[Question]]:
    """The questions of every rung of the search, and held-out ones; the same for equal input. Raises MmaccelError if there are
    too few, also for the confidence."""
    most = FEWEST
    if confidence is not None:
        # so many that the held-out ones can show it
        most = max(most, math.ceil(samples_needed(keep, confidence) / HELD_OUT))
    if len(questions) < most:
        why = f" to show with confidence {confidence:g} that {keep:g} of the answers are kept" if confidence else ""
        raise MmaccelError(f"The search needs at least {most} samples{why}; {len(questions)} can be used.")
    shuffled = random.Random(0).sample(questions, len(questions))
    held = math.ceil(len(shuffled) * HELD_OUT)
    asked, ends = shuffled[held:], list[int]()
    end = min(max(_FIRST[0], len(asked) // HALVING**2), _FIRST[1])
    while end * HALVING <= len(asked):
        ends.append(end)
        end *= HALVING
    ends.append(len(asked))
    return [asked[start:stop] for start, stop in zip([0, *ends], ends, strict=False)], shuffled[:held]


class Search:
    """A study and its measurements.

    rungs : how many rungs of the evaluator are for the search.
    offered : the recipes to search among.
    journal : the trials of earlier runs with the same settings.
    tell : called with the name of a part of the work, how much of it is done, and how much there is.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        rungs: int,
        goal: Goal,
        keep: float,
        offered: Mapping[str, Recipe],
        journal: Journal,
        settings: Mapping[str, Any],
        tell: Callable[[str, int, int], None],
    ) -> None:
        self.tell = tell
        self.evaluator, self.rungs, self.goal, self.keep, self.settings = evaluator, rungs, goal, keep, settings
        self.study = _study(journal, len(evaluator.rungs[0]))
        #: recipes that earlier runs have tried
        self.taken_over = len(self._tried())
        self.known: dict[str, list[Measurement]] = {}
        noted = self.study.user_attrs
        for name, measured in noted.items():
            if name.startswith(_ASKED):
                self.known[name.removeprefix(_ASKED)] = [Measurement.of(one) for one in measured]
        known = noted.get("parts")
        if known is not None:
            left_out = noted["left out"]
            self.space = Space.of(evaluator.family, {name: offered[name] for name in known}, left_out)
            return
        self.space = Space.measure(evaluator, goal, offered, tell)
        for params in self.space.starts(_START):
            self.study.enqueue_trial(params, skip_if_exists=True)
        self.study.set_user_attr("left out", dict(self.space.left_out))
        self.study.set_user_attr("parts", self.space.names)

    def run(self, trials: int, minutes: float | None) -> None:
        """Try recipes until there are ``trials``, those of earlier runs included, or the time is over."""

        def tried() -> int:
            return len(self._tried())

        def tell(*_: Any) -> None:
            self.tell("trying recipes", min(tried(), trials), trials)

        self._pick_up()
        tell()
        ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
        with _quiet():
            while tried() < trials and time.monotonic() < ends:
                if tried() % _OPEN:
                    self._enqueue_neighbour()
                self.study.optimize(self._try, n_trials=1, callbacks=[tell])

    def _tried(self) -> list[optuna.trial.FrozenTrial]:
        from optuna.trial import TrialState

        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    def candidates(self) -> list[Candidate]:
        """Every recipe that was tried, once, without the baselines."""
        tried = dict.fromkeys(trial.user_attrs.get("recipe") for trial in self.study.get_trials(deepcopy=False))
        return [
            Candidate(Recipe.from_json(text), sum(measured, Measurement()), len(measured) == self.rungs)
            for text in tried
            if text is not None and (measured := self.known.get(text))
        ]

    def _pick_up(self) -> None:
        """Repeat the trials that an interrupted run did not finish."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.FAIL)):
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params, skip_if_exists=True)

    def _enqueue_neighbour(self) -> None:
        """Enqueue a trial that differs in one thing from one of the best so far: first a smaller budget as long as enough is
        kept, then single parts at the cost of the best trial, then anything. No trial while others are waiting."""
        from optuna.trial import TrialState

        if self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return
        tried = self._tried()
        done = [trial for trial in tried if trial.state == TrialState.COMPLETE]
        # the best trial of each set of parts
        of_parts = dict[tuple[Any, ...], "optuna.trial.FrozenTrial"]()
        for trial in sorted(done, key=lambda trial: (trial.value, trial.number)):
            of_parts.setdefault(tuple(trial.params[slot] for slot in self.space.parts), trial)
        best = list(of_parts.values())[:_BEST]
        # a pruned trial keeps too little
        values = [(trial.params, trial.value if trial.state == TrialState.COMPLETE else math.inf) for trial in tried]
        for trial in best:
            if self._keeps_enough(trial) and (params := self.space.smaller(trial.params, trial.value, values)):
                self.study.enqueue_trial(params)
                return
        seen = [trial.params for trial in tried]
        for trial in of_parts.values():
            times = best[0].value / trial.value
            if times < 1 and self._keeps_enough(trial) and (params := self.space.alone(trial.params, times, seen)):
                self.study.enqueue_trial(params)
                return
        if best:
            rng = random.Random(len(self.study.trials))
            self.study.enqueue_trial(self.space.neighbour(rng.choice(best).params, rng), skip_if_exists=True)

    def _keeps_enough(self, trial: optuna.trial.FrozenTrial) -> bool:
        measured = self.known[trial.user_attrs["recipe"]]
        return lost(sum(measured, Measurement())) <= 1 - self.keep

    def _try(self, trial: optuna.Trial) -> float:
        """Run a trial rung by rung until it is pruned."""
        import optuna

        try:
            recipe, measured = self.space.suggest(trial), Measurement()
            trial.set_user_attr("recipe", recipe.to_json())
            for rung in range(self.rungs):
                measured += self.ask(recipe, rung)
                value = self.value(measured)
                trial.report(value, len(measured.kept))
                if rung < self.rungs - 1 and trial.should_prune():
                    raise optuna.TrialPruned
        except MmaccelError as error:
            # the parts cannot be combined
            trial.set_user_attr("refused", str(error))
            raise optuna.TrialPruned from error
        return value

    def ask(self, recipe: Recipe, rung: int) -> Measurement:
        """The measurement of a recipe on a rung, from the journal where it has one."""
        text = recipe.to_json()
        done = self.known.setdefault(text, [])
        for number in range(len(done), rung + 1):
            done.append(self.evaluator.ask(recipe, number))
            self.study.set_user_attr(_ASKED + text, [one.as_dict() for one in done])
        return done[rung]

    def value(self, measured: Measurement) -> float:
        """The objective of the study: the cost, and a penalty for losing more answers than allowed."""
        return measured.share(self.goal) + _LOST * max(0.0, lost(measured) - (1 - self.keep))


def _study(journal: Journal, first: int) -> optuna.Study:
    """The study of a journal, a new one if it is empty."""
    try:
        import optuna
        from optuna.storages import JournalStorage
    except ImportError:
        raise MmaccelError("The search needs optuna; run: pip install 'mmaccel[tune]'.") from None
    with _quiet():
        study = optuna.create_study(
            storage=JournalStorage(journal),
            study_name="tune",
            load_if_exists=True,
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=HALVING),
        )
        # a new seed after every interruption, or it would suggest the same again
        study.sampler = optuna.samplers.TPESampler(multivariate=True, group=True, seed=len(study.trials))
    return study


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's messages and warnings about experimental features."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


# ------------------------------------------------------------------------------------------------------------ the end


def lost(measured: Measurement) -> float:
    """The estimated share of answers that a recipe changes.

    A few questions rarely separate recipes, so half of the risk counts as the share of some further questions.
    """
    asked = len(measured.kept)
    return (asked - sum(measured.kept) + _GUESSED * measured.risk / 2) / (asked + _GUESSED)


def front(candidates: Sequence[Candidate], goal: Goal, quality: Callable[[Measurement], float]) -> list[Candidate]:
    """The Pareto front of cost and ``quality``, from the cheapest candidate on."""
    best: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.measured.share(goal), -quality(c.measured))):
        if not best or quality(one.measured) > quality(best[-1].measured):
            best.append(one)
    return best


def choose(
    evaluator: Evaluator, rung: int, ordered: Sequence[Candidate], keep: float, confidence: float | None
) -> tuple[Candidate | None, Measurement | None]:
    """The chosen one of ``ordered`` candidates, the cheapest first, and its measurement on the held-out questions.

    Without a confidence it is the first. With one, candidates are tested from the most expensive on, and the last that passes
    before one fails is chosen: tests in a fixed order may each be made at the full level (Maurer, Hothorn and Lehmacher 1995).
    """
    if confidence is None:
        return (ordered[0], evaluator.ask(ordered[0].recipe, rung)) if ordered else (None, None)
    best: tuple[Candidate | None, Measurement | None] = None, None
    for one in reversed(ordered):
        seen = evaluator.ask(one.recipe, rung)
        if lower_bound(sum(seen.kept), len(seen.kept), confidence) < keep:
            break
        best = one, seen
    return best
