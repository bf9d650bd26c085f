"""The search space: every recipe that works on the model and saves something on the questions, alone and combined.

All recipes, those of other packages too, are tried on a few questions. What the model does not support, or what saves nothing,
is left out with a reason. The others are parts in five slots by the site at which they begin; a candidate has at most one part
of each slot.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from ...errors import MmaccelError
from ...families import Family
from ...method import LayerMethod, Policy
from ...method.keys import CHOICES
from ...method.limits import option_types
from ...method.registry import methods
from ...recipe import Recipe, get_recipe
from .evaluate import Evaluator, Goal

if TYPE_CHECKING:
    from optuna import Trial

#: slots by site; merging inside the tower and pruning after it exclude each other
SLOTS: Mapping[str, str] = {
    "frames": "pixels",
    "patches": "tokens",
    "encoder": "tokens",
    "projector": "tokens",
    "layers": "layers",
    "cache": "cache",
    "codec": "codec",
}
#: the smallest budget that is tried
LEAST = 0.02
#: a part whose smallest budget costs more than this share saves nothing
SAVES = 0.98
_NOTHING = "-"
#: whether kept tokens count for the tokens that they represent
_WEIGHTS = "proportional"
_WEIGHED = ("none", "all")
#: shares of neighbours with another part, and with another part or budget; factors of budgets
_ANOTHER, _BUDGET, _FACTORS = 0.4, 0.75, (0.6, 1.4, 2.0)
#: the factor of a smaller budget, and the ratio of a failing to a passing budget at which bisection ends
_SMALLER, _NEAR = 0.6, 0.88


@dataclass(frozen=True)
class Part:
    """A recipe that may be part of a candidate, and its search space: budget, layer, and choices of options by name."""

    recipe: Recipe
    budget: bool
    layers: tuple[int, int] | None
    choices: Mapping[str, tuple[Any, ...]]

    @property
    def slot(self) -> str:
        """The slot of its site."""
        return SLOTS[self.recipe.stages[0].kind.site]

    @staticmethod
    def of(recipe: Recipe, least: int, depth: int) -> Part:
        """The search space of a recipe in a model of ``depth`` layers in which tokens can be dropped from ``least`` on."""
        built = [m for _, m in recipe.build()]
        lone = built[0] if len(built) == 1 else None
        choices: dict[str, tuple[Any, ...]] = {}
        if lone is not None:
            hints = option_types(type(lone))
            choices = {
                one.name: typing.get_args(hints[one.name])
                for one in dataclasses.fields(lone)  # type: ignore[arg-type]
                if typing.get_origin(hints[one.name]) is typing.Literal
            }
        if isinstance(lone, Policy) and not recipe.stages[0].options:
            choices["layer_budget"] = tuple(CHOICES["layer_budget"])
        layers = (least, depth - 1) if isinstance(lone, LayerMethod) and least < depth - 1 else None
        return Part(recipe, recipe.primary is not None, layers, choices)

    def suggest(self, trial: Trial, most: float) -> Recipe:
        """The recipe of a trial, with a budget that is a share of ``most``."""
        name, changes = f"{self.slot}: {self.recipe.name}", dict[str, Any]()
        if self.budget:
            changes["retain"] = rounded(most * trial.suggest_float(f"{self.slot} budget", LEAST, 1.0, log=True))
        if self.layers is not None:
            changes["layer"] = trial.suggest_int(f"{self.slot} layer", *self.layers)
        for option, values in self.choices.items():
            changes[option] = trial.suggest_categorical(f"{name}, {option}", values)
        return self.recipe.override(**changes)

    def start(self, budget: float) -> dict[str, Any]:
        """The parameters of a trial with this part alone."""
        asked: dict[str, Any] = {self.slot: self.recipe.name}
        if self.budget:
            asked[f"{self.slot} budget"] = budget
        return asked


def rounded(budget: float, digits: int = 2) -> float:
    """A budget with so many significant digits."""
    return float(f"{budget:.{digits}g}")


@dataclass(frozen=True)
class Space:
    """The parts by slot, and what was left out with its reason."""

    parts: Mapping[str, Mapping[str, Part]]
    left_out: Mapping[str, str]

    @staticmethod
    def measure(
        evaluator: Evaluator,
        goal: Goal,
        offered: Mapping[str, Recipe],
        tell: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> Space:
        """The ``offered`` parts that work on the questions of the first rung, each measured once at its smallest budget. Raises
        MmaccelError if none does."""
        useful: dict[str, Recipe] = {}
        left_out: dict[str, str] = {}
        # each once; a method goes before other names of the same recipe
        by_stages: dict[tuple[Any, ...], tuple[str, Recipe]] = {}
        for name, recipe in sorted(offered.items(), key=lambda item: (item[0] not in methods(), item[0])):
            by_stages.setdefault(tuple((one.method, repr(one.options)) for one in recipe.stages), (name, recipe))
        by_stages.pop((), None)
        distinct = dict(by_stages.values())
        for number, (name, recipe) in enumerate(distinct.items(), 1):
            smallest = recipe if recipe.primary is None else recipe.override(retain=LEAST)
            try:
                if evaluator.ask(smallest, 0).share(goal) <= SAVES:
                    useful[name] = recipe
                else:
                    left_out[name] = f"saves nothing of {goal!r} on these samples"
            except MmaccelError as error:
                left_out[name] = str(error)
            tell("looking for what saves something", number, len(distinct))
        if not useful:
            raise MmaccelError(
                f"No recipe saves anything of {goal!r} on these samples with this model; take another goal."
            )
        return Space.of(evaluator.family, useful, left_out)

    @staticmethod
    def of(family: Family, useful: Mapping[str, Recipe], left_out: Mapping[str, str]) -> Space:
        """The space of recipes that are known to save something in a model of this family."""
        parts: dict[str, dict[str, Part]] = {slot: {} for slot in SLOTS.values()}
        for name, recipe in useful.items():
            part = Part.of(recipe, max(1, family.deepstack), family.depth)
            parts[part.slot][name] = part
        return Space({slot: members for slot, members in parts.items() if members}, left_out)

    @property
    def names(self) -> list[str]:
        """The names of all parts."""
        return [name for slot in self.parts.values() for name in slot]

    def suggest(self, trial: Trial) -> Recipe:
        """The candidate of a trial. Raises MmaccelError if its parts cannot be combined."""
        chosen: list[Recipe] = []
        # a stage inside the language model keeps a share of the tokens that enter it
        left = 1.0
        for slot, parts in self.parts.items():
            name = trial.suggest_categorical(slot, [_NOTHING, *parts])
            if name == _NOTHING:
                continue
            chosen.append(parts[name].suggest(trial, left if slot == "layers" else 1.0))
            if slot == "tokens" and isinstance(chosen[-1].retain, float):
                left = chosen[-1].retain
        if not chosen:
            return get_recipe("none")
        taken = {slot for slot in self.parts if trial.params[slot] != _NOTHING}
        if "tokens" not in taken or taken & {"cache", "codec"}:
            # weights need tokens that are dropped before the language model, and an uncompressed cache
            return get_recipe(chosen)
        return get_recipe(chosen, proportional=trial.suggest_categorical(_WEIGHTS, _WEIGHED))

    def neighbour(self, params: Mapping[str, Any], rng: Random) -> dict[str, Any]:
        """Parameters that differ from those of a trial in one thing: the part of a slot, a budget, the weights of tokens, or
        the other options of a part, which are left open."""
        slot = rng.choice([*self.parts, *([_WEIGHTS] if "tokens" in self.parts else [])])
        if slot == _WEIGHTS:
            return {**params, slot: _WEIGHED[params.get(slot) != _WEIGHED[1]]}
        name, budget, move = params.get(slot, _NOTHING), f"{slot} budget", rng.random()
        if name == _NOTHING or move < _ANOTHER:
            return {**params, slot: rng.choice([_NOTHING, *self.parts[slot]])}
        if budget in params and move < _BUDGET:
            return {**params, budget: min(1.0, max(LEAST, params[budget] * rng.choice(_FACTORS)))}
        own = f"{slot} layer", f"{slot}: {name}, "
        return {key: value for key, value in params.items() if not key.startswith(own)}

    def smaller(
        self, best: Mapping[str, Any], value: float, tried: Sequence[tuple[Mapping[str, Any], float]]
    ) -> dict[str, Any] | None:
        """Parameters of a trial with one smaller budget that was not tried yet; None if there is none to gain from. ``tried``
        are parameters and objectives of all trials, ``value`` is that of ``best``."""
        for name in (f"{slot} budget" for slot in self.parts):
            if name not in best:
                continue
            below = [
                (one[name], other)
                for one, other in tried
                if one.get(name, best[name]) < best[name] and {**one, name: None} == {**best, name: None}
            ]
            if any(other <= value for _, other in below):
                continue
            fails = max((budget for budget, _ in below), default=None)
            next_ = best[name] * _SMALLER if fails is None else math.sqrt(fails * best[name])
            if next_ >= LEAST and (fails is None or fails < _NEAR * best[name]):
                return {**best, name: next_}
        return None

    def alone(
        self, params: Mapping[str, Any], times: float, tried: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Parameters of a single part with its budget multiplied; None for several parts, or if a smaller budget was tried."""
        slots = [slot for slot in self.parts if params.get(slot, _NOTHING) != _NOTHING]
        if len(slots) != 1 or (name := f"{slots[0]} budget") not in params:
            return None
        smaller = params[name] * times
        known = any(
            one.get(name, 1.0) < params[name] and {**one, name: None} == {**params, name: None} for one in tried
        )
        return {**params, name: smaller} if smaller >= LEAST and not known else None

    def starts(self, budget: float) -> list[dict[str, Any]]:
        """The parameters of trials with single parts; their other options are left to the search."""
        alone = dict.fromkeys(self.parts, _NOTHING)
        return [{**alone, **part.start(budget)} for parts in self.parts.values() for part in parts.values()]
