"""What a search has to beat: recipes of one part at the cost of what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from ...errors import MmaccelError
from ...recipe import Recipe
from .evaluate import Goal, Measured
from .search import Candidate, Search, lost
from .space import rounded

#: two costs are equal that differ by less than this share of them, or of what the bare model spends
_EQUAL, _ROUNDED = 0.02, 0.004
#: of few tokens not every share can be had: a cost is as near as can be if it differs by less than this share
_NEAR = 0.2
#: the smallest budget that a part alone is given, and how often one is mended
_LEAST, _TIMES = 0.005, 4
#: of the parts, how many are asked every question: those that have moved the answers to the first ones least
_ASKED = 6


def at_cost(
    ask: Callable[[Recipe], Measured], fixed: Recipe, goal: Goal, cost: float, *, over: bool = False
) -> tuple[Recipe, Measured] | None:
    """A recipe with the budget at which it costs as much, and what was measured of it; None where it cannot be had so.

    Parameters
    ----------
    ask : what becomes of some questions with a recipe.
    cost : the share of ``goal`` that is to be spent of what the bare model spends.
    over : where too few tokens are there for this share, whether the next one above it is taken, or the one below.
    """
    budget, near = cost, dict[float, tuple[Recipe, Measured]]()
    for _ in range(_TIMES):
        if not _LEAST <= budget <= 1:
            break
        one = fixed.override(retain=rounded(budget, 3))
        measured = ask(one)
        found = measured.share(goal)
        if abs(found - cost) < max(_EQUAL * cost, _ROUNDED):
            return one, measured
        if over == (found > cost) and abs(found - cost) < _NEAR * cost:
            near[abs(found - cost)] = one, measured
        # what a recipe costs is near a straight line through nothing saved
        budget = 1 - (1 - budget) * (1 - cost) / max(1 - found, 1e-6)
    return near[min(near)] if near else None


def best_of(search: Search, found: Candidate) -> Candidate:
    """``found``, or what keeps the answers to the questions of the search better at its cost: a part alone.

    The cheapest of hundreds of recipes that seemed to keep enough was lucky; parts that are asked at this cost because they
    are parts were not.
    """
    keeps = [one for one in _rivals(search, found) if one.measured.agreement >= search.keep]
    return min([found, *keeps], key=lambda one: lost(one.measured))


def _rivals(search: Search, found: Candidate) -> Iterator[Candidate]:
    """The best parts alone, asked every question of the search."""
    cost, first = found.measured.share(search.goal), list[tuple[Recipe, Measured]]()
    alone = [part for parts in search.space.parts.values() for part in parts.values() if part.budget]
    for number, part in enumerate(alone, 1):
        # a budget may be one that the part cannot have
        with suppress(MmaccelError):
            same = at_cost(lambda recipe: search.ask(recipe, 0), part.recipe, search.goal, cost)
            first += [] if same is None else [same]
        search.tell("trying every part alone at the same cost", number, len(alone))
    for recipe, seen in sorted(first, key=lambda pair: lost(pair[1]))[:_ASKED]:
        # what fails on a later question is no rival, and takes nothing from what was found
        with suppress(MmaccelError):
            whole = sum((search.ask(recipe, rung) for rung in range(1, search.rungs)), seen)
            yield Candidate(recipe, whole, True)
