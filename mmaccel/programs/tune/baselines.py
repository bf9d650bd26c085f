"""Baselines that a search must beat: single methods at the cost of the recipe that it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from ...errors import MmaccelError
from ...recipe import Recipe
from .evaluate import Goal, Measurement
from .search import Candidate, Search, lost
from .space import rounded

#: costs are equal that differ by less than this share of them, or of the bare model's cost
_EQUAL, _ROUNDED = 0.02, 0.004
#: few tokens do not allow every share: the nearest cost counts if it differs by less than this share
_NEAR = 0.2
#: the smallest budget of a method alone, and how often a budget is adjusted
_LEAST, _TIMES = 0.005, 4
#: how many methods are asked every question: those that have changed the answers to the first ones least
_ASKED = 6


def at_equal_cost(
    ask: Callable[[Recipe], Measurement], fixed: Recipe, goal: Goal, cost: float, *, over: bool = False
) -> tuple[Recipe, Measurement] | None:
    """A recipe with the budget at which it costs as much, and its measurement; None if there is no such budget.

    ask : measures a recipe on some questions.
    cost : the share of ``goal`` that is to be spent of what the bare model spends.
    over : where too few tokens are there for this share, take the next one above it rather than below.
    """
    budget, near = cost, dict[float, tuple[Recipe, Measurement]]()
    for _ in range(_TIMES):
        if not _LEAST <= budget <= 1:
            break
        one = fixed.override(retain=rounded(budget, 3))
        measured = ask(one)
        share = measured.share(goal)
        if abs(share - cost) < max(_EQUAL * cost, _ROUNDED):
            return one, measured
        if over == (share > cost) and abs(share - cost) < _NEAR * cost:
            near[abs(share - cost)] = one, measured
        # what a recipe costs is near a straight line through nothing saved
        budget = 1 - (1 - budget) * (1 - cost) / max(1 - share, 1e-6)
    return near[min(near)] if near else None


def best_of(search: Search, best: Candidate) -> Candidate:
    """``best``, or a single method that keeps more answers at its cost.

    The cheapest of hundreds may have won by luck; single methods, tested without a search, did not.
    """
    keeps = [one for one in _baselines(search, best) if one.measured.agreement >= search.keep]
    return min([best, *keeps], key=lambda one: lost(one.measured))


def _baselines(search: Search, best: Candidate) -> Iterator[Candidate]:
    """The best single methods, asked every question of the search."""
    cost, first = best.measured.share(search.goal), list[tuple[Recipe, Measurement]]()
    alone = [part for parts in search.space.parts.values() for part in parts.values() if part.budget]
    for number, part in enumerate(alone, 1):
        # a method may not take every budget
        with suppress(MmaccelError):
            same = at_equal_cost(lambda recipe: search.ask(recipe, 0), part.recipe, search.goal, cost)
            first += [] if same is None else [same]
        search.tell("trying single methods at the same cost", number, len(alone))
    for recipe, seen in sorted(first, key=lambda pair: lost(pair[1]))[:_ASKED]:
        # a method that fails on a later question is left out
        with suppress(MmaccelError):
            whole = sum((search.ask(recipe, rung) for rung in range(1, search.rungs)), seen)
            yield Candidate(recipe, whole, True)
