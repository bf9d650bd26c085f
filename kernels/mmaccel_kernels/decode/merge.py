"""Merge the partial results of the programs that share a cache, in one launch.

Keys in full precision, with pages that are read among them, are shared out by one rule; pages with a loop of their own
(:mod:`.paged`) by another. Each rule says which programs have finished a head, so that no sum depends on the order of arrival.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._softmax import gathered, leave
from .._triton import jit, tl, triton
from ..launch import Repeated, is_even
from ..pages import Plane
from ..pages.rotation import block_diagonal_on, matrices_on
from ..pages.storage import rotated_apart

#: what is put together at once
PARTS = 32


class Share(NamedTuple):
    """Division of keys over programs by :func:`before` and :func:`share`: whether some are ragged, whether a tail has room,
    tokens of a page (0: none), programs of a multiprocessor, tokens of a unit and of a tile, and all programs."""

    ragged: bool
    roomy: bool
    page: int
    each: int
    unit: int
    tile: int
    programs: int


class Left(NamedTuple):
    """Partial results of programs for every head that they visited: parts of attention, and their log-sum-exps to base 2.

    bounds : where heads begin in flat storage, where in the table of pages, and how many keys of the tail there are; each None
        where that does not matter. capacity : keys that the tail has room for.
    """

    part: Tensor
    part_lse: Tensor
    bounds: tuple[Tensor | None, Tensor | None, Tensor | None]
    capacity: int
    share: Share


class Turn(NamedTuple):
    """A map of the channels of a head before they are coded, or after.

    factor : ``[B Hkv, D]``, by which each is multiplied. rotation : ``[D, D]`` float32. None for none.
    channels : ``[B Hkv, n]`` int32, those that come first in the rotation, ascending, before the others; None for the order
        they have.
    """

    factor: Tensor | None
    rotation: Tensor | None
    channels: Tensor | None = None

    @property
    def kind(self) -> tuple[int, int]:
        """1 for factors, 2 for a rotation, 3 for both; and how many channels come first in it, 0 for their own order."""
        first = 0 if self.channels is None else self.channels.shape[1]
        return (self.factor is not None) + 2 * (self.rotation is not None), first


def turn_of(planes: tuple[Plane, ...]) -> Turn | None:
    """Factors and rotation of a plane that holds all channels, or of two that are rotated apart; None if there is neither."""
    plane = planes[0]
    form, factor, device = plane.format, plane.factor, plane.codes.device
    if rotated_apart(planes):
        parts = tuple((of.codes.shape[2], of.format.seed or 0) for of in planes)
        assert plane.channels is not None
        return Turn(None, block_diagonal_on(device, parts), plane.channels.contiguous())
    if len(planes) > 1 or (factor is None and form.seed is None):
        return None
    rotation = None
    if form.seed is not None:
        rotation = matrices_on(device, plane.codes.shape[2], form.seed, form.sketch)[1]
    return Turn(None if factor is None else factor.contiguous(), rotation)


class LeftOfPages(NamedTuple):
    """The same of launches over pages alone; ``units`` of a page are shared out among ``programs`` by :func:`share_of`, to
    ``tile`` units rather for one of ``each``. ``turn`` is that of values, which are turned back when they are merged."""

    part: Tensor
    part_lse: Tensor
    cu_pages: Tensor
    units: int
    programs: int
    tile: int = 1
    each: int = 1
    turn: Turn | None = None


def merged(query: Tensor, heads: int, dv: int, dense: Left | None, paged: LeftOfPages | None) -> tuple[Tensor, Tensor]:
    """Attention of ``query [B, Hq, q, D]`` over keys of so many ``heads`` and values of ``dv`` channels, and its log-sum-exp to
    base e, of what one or two launches have left."""
    b, hq, q, _ = query.shape
    out, lse = query.new_empty(b, hq, q, dv), query.new_empty(b, hq, q, dtype=torch.float32)
    of_dense = (None, None, None, None, None) if dense is None else (dense.part, dense.part_lse, *dense.bounds)
    of_pages = (None, None, None) if paged is None else paged[:3]
    share = None if dense is None else dense.share
    rule = (0, 1, 1, 1) if paged is None else paged[3:7]
    turn = (None if paged is None else paged.turn) or Turn(None, None)
    given = [x for x in (*of_dense[:4], *of_pages, *turn, out, lse) if x is not None]
    filled = of_dense[4]
    types = (*[x.dtype for x in given], None if filled is None else filled.dtype)
    merging = _merging(_merge, query.device, types, share, rule, turn.kind, dv)
    merging.launch(
        (b * heads, hq // heads * q, 1), is_even((0,), given),
        *of_dense, *of_pages, *turn, out, lse, b * heads, hq // heads * q, 0 if dense is None else dense.capacity,
    )  # fmt: skip
    return out, lse


@lru_cache(maxsize=256)
def _merging(
    kernel: Any,
    device: torch.device,
    types: tuple[torch.dtype | None, ...],
    share: Share | None,
    of_pages: tuple[int, int, int, int],
    turn: tuple[int, int],
    dv: int,
) -> Repeated:
    """The launch, the same at every step."""
    (units, programs, tile, each), block = of_pages, max(16, triton.next_power_of_2(dv))
    rule = share or Share(False, False, 0, 1, 1, 1, 1)
    options = {"DENSE": share is not None, **{name.upper(): value for name, value in rule._asdict().items()}}
    options |= {"OF_PAGE": units, "LOOPS": programs, "PAGE_TILE": tile, "PAGE_EACH": each, "TURN": turn}
    options |= {"DV": dv, "BLOCK_DV": block, "PARTS": PARTS}
    # a rotation is held in registers, 64 a thread
    return Repeated(kernel, {**options, "num_warps": max(4, block * block // 2048) if turn[0] & 2 else 4})


# --- how keys are shared out ------------------------------------------------------------------------------------------
@jit
def filled_of(filled, capacity, ROOMY: tl.constexpr):
    """Keys in everybody's tail: all there is room for, or as many as the device says."""
    if ROOMY:
        capacity = tl.minimum(tl.load(filled).to(tl.int32), capacity)
    return capacity


@jit
def before(lengths, h, RAGGED: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr):
    """Units before head ``h``: at most one more a head than are needed, and no sum over heads to find it.

    A page counts as full. ``lengths`` are where heads begin in flat storage, and in the table of pages, and the units of
    everybody's tail.
    """
    cu_lengths, cu_pages, tail_units = lengths
    units = h * tail_units
    if PAGE:
        units += tl.load(cu_pages + h) * (PAGE // UNIT)
    if RAGGED:
        units += (tl.load(cu_lengths + h) // UNIT).to(tl.int32) + h
    return units


@jit
def share_of(units, programs, EACH: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr):
    """Number of units of a program: the same for each, up to a whole tile rather for one program of a multiprocessor
    than a part of one for each."""
    few = tl.minimum(units // (programs // EACH), TILE // UNIT)
    return tl.maximum(tl.maximum(tl.cdiv(units, programs), few), 1)


# --- the launch -------------------------------------------------------------------------------------------------------
@jit
def _between(begin, end, share):
    """The first and the last program with a share of units from ``begin`` to ``end``; none may have visited an empty head."""
    first = begin // share
    return first, tl.where(end > begin, (end - 1) // share, first - 1)


@jit
def place_of(channels, head, d, FIRST: tl.constexpr):
    """Places of the channels ``d`` of a head in a rotation: the ``FIRST`` listed ``channels`` stand before the others."""
    below, listed = tl.zeros_like(d), tl.zeros_like(d)
    for start in tl.static_range(0, FIRST, 32):
        k = start + tl.arange(0, 32)
        channel = tl.load(channels + head.to(tl.int64) * FIRST + k, mask=k < FIRST, other=1 << 30)
        below += tl.sum((channel[:, None] < d[None, :]).to(tl.int32), 0)
        listed += tl.sum((channel[:, None] == d[None, :]).to(tl.int32), 0)
    return tl.where(listed > 0, below, FIRST + d - below)


@jit
def _turned_back(x, factor, rotation, channels, head, TURN: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Sums ``[BLOCK_DV]`` of values as they are stored, rotated back and multiplied by the factors of a head."""
    d = tl.arange(0, BLOCK_DV)
    if TURN[0] & 2:
        there = (d < DV)[:, None] & (d < DV)[None, :]
        place = d
        if TURN[1]:
            place = place_of(channels, head, d, TURN[1])
        x = tl.sum(tl.load(rotation + d[:, None] * DV + place[None, :], mask=there, other=0.0) * x[:, None], 0)
    if TURN[0] & 1:
        x *= tl.load(factor + head.to(tl.int64) * DV + d, mask=d < DV, other=0.0).to(tl.float32)
    return x


@jit(do_not_specialize=["heads", "rows", "capacity"], do_not_specialize_on_alignment=["filled"])
def _merge(
    part, part_lse, cu_lengths, cu_pages, filled, page_part, page_part_lse, page_bounds, factor, rotation, channels, out, lse,
    heads, rows, capacity,
    DENSE: tl.constexpr, RAGGED: tl.constexpr, ROOMY: tl.constexpr, PAGE: tl.constexpr, EACH: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, OF_PAGE: tl.constexpr, LOOPS: tl.constexpr,
    PAGE_TILE: tl.constexpr, PAGE_EACH: tl.constexpr, TURN: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row of one head: what the programs that share its keys have found, weighed by their sums of exponentials."""
    head, row = tl.program_id(0), tl.program_id(1)
    state = float("-inf"), 0.0, tl.zeros([BLOCK_DV], tl.float32)
    if OF_PAGE:
        share = share_of(tl.load(page_bounds + heads) * OF_PAGE, LOOPS, PAGE_EACH, PAGE_TILE, 1)
        begin, end = tl.load(page_bounds + head) * OF_PAGE, tl.load(page_bounds + head + 1) * OF_PAGE
        first, last = _between(begin, end, share)
        state = gathered(page_part, page_part_lse, head, row, rows, first, last, state, DV, BLOCK_DV, PARTS)
        if TURN[0]:
            highest, total, acc = state
            state = highest, total, _turned_back(acc, factor, rotation, channels, head, TURN, DV, BLOCK_DV)
    if DENSE:
        lengths = (cu_lengths, cu_pages, tl.cdiv(filled_of(filled, capacity, ROOMY), UNIT))
        share = share_of(before(lengths, heads, RAGGED, PAGE, UNIT), PROGRAMS, EACH, TILE, UNIT)
        begin, end = before(lengths, head, RAGGED, PAGE, UNIT), before(lengths, head + 1, RAGGED, PAGE, UNIT)
        first, last = _between(begin, end, share)
        state = gathered(part, part_lse, head, row, rows, first, last, state, DV, BLOCK_DV, PARTS)
    leave(out, lse, head, row, rows, state, DV, BLOCK_DV)


__all__ = ["Left", "LeftOfPages", "Share", "Turn", "before", "filled_of", "merged", "place_of", "share_of", "turn_of"]
