"""Bounds of pages: the largest product that a query can have with any key of a page, from its extremes channel by channel."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..launch import run
from .naive import page_bounds_definition
from .triton import page_bounds_kernel

#: how the query heads of one key head are joined
Join = Literal["max", "mean"]


def page_bounds(query: Tensor, extremes: Tensor, join: Join = "max") -> Tensor:
    """``sum_d max(q_d min_d, q_d max_d)`` of every page (Quest, arXiv 2406.10774), unscaled; all pages of all heads at once.

    Parameters
    ----------
    query : ``[B, Hq, D]``, floating point; ``Hq`` is a multiple of ``Hkv``.
    extremes : ``[B, Hkv, P, 2 D]``, floating point: the largest key of every page channel by channel, then the smallest.
    join : how the bounds of the query heads of one key head are joined.

    Returns
    -------
    ``[B, Hkv, P]`` float32.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    fits = query.dim() == 3 and extremes.dim() == 4 and len(query) == len(extremes)
    if not fits or query.shape[1] % max(1, extremes.shape[1]) or extremes.shape[3] != 2 * query.shape[2]:
        raise ValueError(
            "page_bounds takes query [B, Hq, D] and extremes [B, Hkv, P, 2 D] with Hq a multiple of Hkv, not "
            f"{tuple(query.shape)} and {tuple(extremes.shape)}."
        )
    if join not in ("max", "mean"):
        raise ValueError(f"page_bounds joins heads by 'max' or 'mean', not {join!r}.")
    if not extremes.numel():
        return page_bounds_definition(query, extremes, join)
    return run(page_bounds_kernel, page_bounds_definition, query, extremes, join)


def page_bounds_cost(batch: int, heads: int, kv: int, pages: int, width: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that have to be moved at least, and floating-point operations."""
    moved = bytes_each * batch * (heads * width + 2 * kv * pages * width) + 4 * batch * kv * pages
    return moved, 4 * batch * heads * pages * width


__all__ = ["Join", "page_bounds", "page_bounds_cost", "page_bounds_definition", "page_bounds_kernel"]
