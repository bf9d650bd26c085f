"""What a search has to beat: recipes of one part at the cost of what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...errors import MmaccelError
from ...recipe import Recipe
from .judge import Measured
from .search import Candidate, Search, lost

#: two costs are equal that differ by less than this share of them, or of what the bare model spends
_EQUAL, _ROUNDED = 0.02, 0.004
#: of few tokens not every share can be had: a cost is as near as can be if it differs by less than this share
_NEAR = 0.12
#: the smallest budget that is tried, and how often one is mended
_LEAST, _TIMES = 0.005, 4
#: of the parts, how many are asked every question: those that have moved the answers to the first ones least
_ASKED = 6


def at_cost(share: Callable[[Recipe], float], fixed: Recipe, cost: float, *, over: bool = False) -> Recipe | None:
    """A recipe with the budget at which it costs as much; None where it cannot be had so.

    Parameters
    ----------
    share : what a recipe spends of what the bare model spends.
    cost : such a share.
    over : where too few tokens are there for this share, whether the next one above it is taken, or the one below.
    """
    budget, near = cost, dict[float, Recipe]()
    for _ in range(_TIMES):
        if not _LEAST <= budget <= 1:
            break
        one = fixed.override(retain=float(f"{budget:.3g}"))
        found = share(one)
        if abs(found - cost) < max(_EQUAL * cost, _ROUNDED):
            return one
        if over == (found > cost) and abs(found - cost) < _NEAR * cost:
            near[abs(found - cost)] = one
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
    judge, goal = search.judge, search.goal
    first: list[tuple[float, Recipe]] = []
    for parts in search.space.parts.values():
        for part in parts.values():
            if not part.budget:
                continue
            seen: list[tuple[Recipe, Measured]] = []

            def share(recipe: Recipe, seen: list[tuple[Recipe, Measured]] = seen) -> float:
                seen.append((recipe, judge.ask(recipe, 0)))
                return seen[-1][1].share(goal)

            try:
                same = at_cost(share, part.recipe, found.measured.share(goal))
            except MmaccelError:
                # a budget that the part cannot have
                continue
            first += [(lost(measured), recipe) for recipe, measured in seen if recipe is same]
    for _, recipe in sorted(first, key=lambda pair: pair[0])[:_ASKED]:
        yield Candidate(recipe, sum((judge.ask(recipe, rung) for rung in range(search.rungs)), Measured()), True)


__all__ = ["at_cost", "best_of"]
