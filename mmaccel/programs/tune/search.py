"""An Optuna study whose trials are recipes, few questions first, that goes on where it was interrupted; and its choice."""

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
from .confidence import lower, needed
from .evaluate import Goal, Judge, Measured
from .journal import Journal
from .space import Space

if TYPE_CHECKING:
    import optuna

#: of the samples, what the search never sees
HELD_OUT = 0.3
#: fewer samples than this show nothing, whatever is asked
FEWEST = 10
#: of the recipes that were asked the questions of one rung, one in so many is asked those of the next
HALVING = 3
#: questions of the first rung
_FIRST = (4, 16)
#: what an answer too few counts, in shares of what the bare model spends, and how many questions the risk is worth
_LOST, _GUESSED = 10.0, 8
#: one trial in so many is Optuna's; the others differ in one thing from one of so many that are best, each of other parts
_OPEN, _BEST = 4, 8
#: the budget at which every part is asked alone before the search proper
_START = 0.5
#: under what name the journal has what a recipe did
_ASKED = "asked "


@dataclass(frozen=True)
class Candidate:
    """A recipe, and what is known of it on the questions of the search, or those of its first rungs."""

    recipe: Recipe
    measured: Measured
    asked_all: bool


@dataclass(frozen=True)
class Tuned:
    """What a search has found.

    recipe : the cheapest one that keeps enough; None where none does.
    front : the recipes that none beats in both what they spend and what they keep, from the cheapest on.
    held_out : the recipe on the questions that the search never saw; None without a recipe. With ``generated``, the share of
        answers that were the same when they were written token by token.
    report : all figures as plain data, which the report shows and the recipe's file carries.
    """

    goal: Goal
    keep: float
    recipe: TunedRecipe | None
    chosen: Candidate | None
    front: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    held_out: Measured | None
    generated: float | None
    report: Mapping[str, Any]

    @property
    def share(self) -> float | None:
        """What the recipe spends of what the bare model spends, on the questions of the search."""
        return None if self.chosen is None else self.chosen.measured.share(self.goal)


def split(
    questions: Sequence[Question], keep: float, confidence: float | None
) -> tuple[list[list[Question]], list[Question]]:
    """The questions of every rung of the search, and those held out; always the same ones. Raises MmaccelError if they are
    too few to show anything, or too few for the confidence."""
    most = FEWEST
    if confidence is not None:
        # so many that the part that is held out can show it
        most = max(most, math.ceil(needed(keep, confidence) / HELD_OUT))
    if len(questions) < most:
        why = (
            f" to show with a confidence of {confidence:g} that {keep:g} of the answers are kept" if confidence else ""
        )
        raise MmaccelError(f"There are {len(questions)} samples that can be used, and {most} are needed{why}.")
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
    """A study and what it knows.

    Parameters
    ----------
    rungs : how many of the judge's are for the search.
    offered : the recipes to search among.
    journal : what earlier runs with these settings have tried.
    tell : called with what is being done, how much of it is done, and how much there is.
    """

    def __init__(
        self,
        judge: Judge,
        rungs: int,
        goal: Goal,
        keep: float,
        offered: Mapping[str, Recipe],
        journal: Journal,
        settings: Mapping[str, Any],
        tell: Callable[[str, int, int], None],
    ) -> None:
        self.tell = tell
        self.judge, self.rungs, self.goal, self.keep, self.settings = judge, rungs, goal, keep, settings
        self.study = _study(journal, len(judge.rungs[0]))
        #: recipes that earlier runs have tried
        self.taken_over = len(self._tried())
        self.known: dict[str, list[Measured]] = {}
        noted = self.study.user_attrs
        for name, measured in noted.items():
            if name.startswith(_ASKED):
                self.known[name.removeprefix(_ASKED)] = [Measured.of(one) for one in measured]
        known = noted.get("parts")
        if known is not None:
            left_out = noted["left out"]
            self.space = Space.of(judge.family, {name: offered[name] for name in known}, left_out)
            return
        self.space = Space.found(judge, goal, offered, tell)
        for params in self.space.starts(_START):
            self.study.enqueue_trial(params, skip_if_exists=True)
        self.study.set_user_attr("left out", dict(self.space.left_out))
        self.study.set_user_attr("parts", self.space.names)

    def run(self, trials: int, minutes: float | None) -> None:
        """Try so many recipes in all, those of earlier runs included."""

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
                    self._try_beside_the_best()
                self.study.optimize(self._try, n_trials=1, callbacks=[tell])

    def _tried(self) -> list[optuna.trial.FrozenTrial]:
        from optuna.trial import TrialState

        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    def candidates(self) -> list[Candidate]:
        """Every recipe that was tried, once; not those that what was found had to beat."""
        tried = dict.fromkeys(trial.user_attrs.get("recipe") for trial in self.study.get_trials(deepcopy=False))
        return [
            Candidate(Recipe.from_json(text), sum(measured, Measured()), len(measured) == self.rungs)
            for text in tried
            if text is not None and (measured := self.known.get(text))
        ]

    def _pick_up(self) -> None:
        """Ask again what an interrupted run was in the middle of."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.FAIL)):
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params, skip_if_exists=True)

    def _try_beside_the_best(self) -> None:
        """Enqueue a trial that differs in one thing from one of the best so far, first of all in a budget, which is made
        smaller as long as enough is kept; parts alone that keep enough are tried at what the best one spends. None while parts
        are asked alone for the first time."""
        from optuna.trial import TrialState

        if self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return
        tried = self._tried()
        done = [trial for trial in tried if trial.state == TrialState.COMPLETE]
        # of those with the same parts the best one
        of_parts = dict[tuple[Any, ...], "optuna.trial.FrozenTrial"]()
        for trial in sorted(done, key=lambda trial: (trial.value, trial.number)):
            of_parts.setdefault(tuple(trial.params[slot] for slot in self.space.parts), trial)
        best = list(of_parts.values())[:_BEST]
        # what was pruned keeps too little, whatever its first questions said
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
            dice = random.Random(len(self.study.trials))
            self.study.enqueue_trial(self.space.beside(dice.choice(best).params, dice), skip_if_exists=True)

    def _keeps_enough(self, trial: optuna.trial.FrozenTrial) -> bool:
        measured = self.known[trial.user_attrs["recipe"]]
        return lost(sum(measured, Measured())) <= 1 - self.keep

    def _try(self, trial: optuna.Trial) -> float:
        """One trial: rung by rung, until the pruner has seen enough."""
        import optuna

        try:
            recipe, measured = self.space.suggest(trial), Measured()
            trial.set_user_attr("recipe", recipe.to_json())
            for rung in range(self.rungs):
                measured += self.ask(recipe, rung)
                value = self.value(measured)
                trial.report(value, len(measured.kept))
                if rung < self.rungs - 1 and trial.should_prune():
                    raise optuna.TrialPruned
        except MmaccelError as error:
            # parts that do not go together
            trial.set_user_attr("refused", str(error))
            raise optuna.TrialPruned from error
        return value

    def ask(self, recipe: Recipe, rung: int) -> Measured:
        """What a recipe does to the questions of a rung, from the journal where it was asked them before."""
        text = recipe.to_json()
        done = self.known.setdefault(text, [])
        for number in range(len(done), rung + 1):
            done.append(self.judge.ask(recipe, number))
            self.study.set_user_attr(_ASKED + text, [one.as_dict() for one in done])
        return done[rung]

    def value(self, measured: Measured) -> float:
        """What the study makes small: what is spent, and what more answers are lost than may be."""
        return measured.share(self.goal) + _LOST * max(0.0, lost(measured) - (1 - self.keep))


def _study(journal: Journal, first: int) -> optuna.Study:
    """The study of a journal, which is made where there is none."""
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
        # another seed after every interruption, or it would say the same again
        study.sampler = optuna.samplers.TPESampler(multivariate=True, group=True, seed=len(study.trials))
    return study


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Optuna says about every trial, and about parts of it that may change."""
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


def lost(measured: Measured) -> float:
    """The share of answers that a recipe loses.

    Of few questions most recipes lose none, so it is told from the risk, too: about half of it is lost, which counts like so
    many questions more.
    """
    asked = len(measured.kept)
    return (asked - sum(measured.kept) + _GUESSED * measured.risk / 2) / (asked + _GUESSED)


def front(candidates: Sequence[Candidate], goal: Goal, quality: Callable[[Measured], float]) -> list[Candidate]:
    """Those that none beats in both what they spend and ``quality``, from the cheapest on."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.measured.share(goal), -quality(c.measured))):
        if not found or quality(one.measured) > quality(found[-1].measured):
            found.append(one)
    return found


def choose(
    judge: Judge, rung: int, ordered: Sequence[Candidate], keep: float, confidence: float | None
) -> tuple[Candidate | None, Measured | None]:
    """The candidate, of those that keep enough from the cheapest on, and what it does to the questions that were held out.

    Without a confidence the first. With one, candidates are tested from the safest on, and the last that passes before one
    fails is taken: of tests in an order that was fixed beforehand, each may be made at the full level (Maurer, Hothorn and
    Lehmacher 1995).
    """
    if confidence is None:
        return (ordered[0], judge.ask(ordered[0].recipe, rung)) if ordered else (None, None)
    best: tuple[Candidate | None, Measured | None] = None, None
    for one in reversed(ordered):
        seen = judge.ask(one.recipe, rung)
        if lower(sum(seen.kept), len(seen.kept), confidence) < keep:
            break
        best = one, seen
    return best
