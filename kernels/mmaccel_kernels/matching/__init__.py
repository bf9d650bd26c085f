"""Bipartite matching: for every vector of one set the best of another, without the matrix of their products."""

from __future__ import annotations

import torch
from torch import Tensor

from ..copies import first_copies, of_first
from ..launch import run
from .naive import best_match_definition
from .triton import best_match_kernel, tiles


def best_match(x: Tensor, y: Tensor, there: Tensor | None = None, *, others: bool = False) -> tuple[Tensor, Tensor]:
    """The largest product of every row of ``x`` with a row of ``y``, and where it is.

    With unit vectors this is the proposal step of bipartite soft matching (ToMe, arXiv 2210.09461).

    Parameters
    ----------
    x : ``[N, a, D]`` float16, bfloat16 or float32; products are summed in float32.
    y : ``[N, b, D]``, of the same type.
    there : ``[N, b]`` bool, the rows of ``y`` that count; by default all.
    others : row ``i`` of ``x`` is not matched with row ``i`` of ``y``; for sets matched with themselves.

    Returns
    -------
    ``[N, a]`` float32 and ``[N, a]`` long. Equal products go to the lower place; where nothing is to be matched, minus
    infinity and 0. Unless ``others``, rows that are equal to the bit have the same products, however the device rounds.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    _check(x, y, there)
    score, place = _matched(x, y, there, others)
    if others or not y.shape[1]:
        # copies differ in which other one they may match
        return score, place
    mine, theirs = first_copies(x), first_copies(y, there)
    place = of_first(place, mine)
    return of_first(score, mine), place if theirs is None else theirs.gather(1, place)


def most_alike(
    x: Tensor, a: Tensor, b: Tensor, there: Tensor | None = None, *, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`best_match` of some of the unit vectors ``x [N, n, D]`` with others, by cosine: ``a [N, p]`` and ``b [N, q]`` are
    slots of ``x``, and ``first`` is what :func:`first_copies` says of ``x``.

    No cosine is above one, and that of a vector and its copy is one, so that all pairs of copies tie.
    """
    row = torch.arange(len(x), device=x.device)[:, None]
    score, place = _matched(x[row, a], x[row, b], there, False)
    score = score.clamp(max=1.0)
    if first is None or not b.shape[1]:
        return score, place
    mine, theirs = first.gather(1, a), first.gather(1, b)
    here, home = _first_places(mine, x.shape[1], None), _first_places(theirs, x.shape[1], there)
    lead = here.gather(1, mine)
    score, place = score.gather(1, lead), place.gather(1, lead)
    none, twin = b.shape[1], home.gather(1, mine)
    place = torch.where(score > -torch.inf, home.gather(1, theirs.gather(1, place)), place)
    # a vector of zeros has no direction
    copy = (twin < none) & (score > 0)
    return score.masked_fill(copy, 1.0), torch.where(copy, twin, place)


def _first_places(name: Tensor, names: int, there: Tensor | None) -> Tensor:
    """``[N, names]`` long: the first place of ``name [N, p]`` that is there and has each name; ``p`` for none."""
    place = torch.arange(name.shape[1], device=name.device).expand_as(name)
    if there is not None:
        place = place.masked_fill(~there, name.shape[1])
    return place.new_full((len(name), names), name.shape[1]).scatter_reduce(1, name, place, "amin")


def _matched(x: Tensor, y: Tensor, there: Tensor | None, others: bool) -> tuple[Tensor, Tensor]:
    if not x.numel() or not y.shape[1]:
        return best_match_definition(x, y, there, others)
    return run(best_match_kernel, best_match_definition, x, y, there, others)


def best_match_cost(rows: int, a: int, b: int, width: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that a launch has to move at least, and its floating-point operations."""
    return rows * ((a + b) * width * bytes_each + a * (4 + 8)), 2 * rows * a * b * width


def _check(x: Tensor, y: Tensor, there: Tensor | None) -> None:
    if x.dim() != 3 or y.dim() != 3 or len(x) != len(y) or x.shape[2] != y.shape[2]:
        raise ValueError(f"best_match takes x [N, a, D] and y [N, b, D], not {tuple(x.shape)} and {tuple(y.shape)}.")
    if x.dtype != y.dtype or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"best_match takes float16, bfloat16 or float32, x and y alike, not {x.dtype} and {y.dtype}.")
    if there is not None and (there.shape != y.shape[:2] or there.dtype != torch.bool):
        raise ValueError(
            f"best_match takes there [N, b] = {tuple(y.shape[:2])} bool, not {tuple(there.shape)} {there.dtype}."
        )


__all__ = ["best_match", "best_match_cost", "best_match_definition", "best_match_kernel", "most_alike", "tiles"]
