"""The best units as a Triton program: a program finds the bar of one head digit by digit, as in a radix sort, and lists what is
above it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import Repeated, is_even

#: ratings that a program looks at together
BLOCK = 2048


def best_units_kernel(
    ratings: Tensor, count: Tensor, most: int, each: int = 1, gone: Tensor | None = None, least: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`.best_units` in one launch."""
    (batch, heads), units = ratings.shape[:2], ratings.shape[2] // each
    ratings = ratings.contiguous()
    picked = torch.empty(batch, heads, most, dtype=torch.int32, device=ratings.device)
    counts = torch.empty(batch, heads, dtype=torch.int32, device=ratings.device)
    hidden = None if gone is None else (gone if gone.stride(2) == 1 else gone.contiguous()).view(torch.uint8)
    tensors = [x for x in (ratings, count, hidden, least) if x is not None]
    _repeated(_best_units, ratings.device, ratings.dtype, each, hidden is not None, least is not None).launch(
        (batch * heads, 1, 1), is_even((), tensors),
        ratings, count, hidden, least, picked, counts, units, most, heads,
        count.stride(0), count.stride(1) if count.shape[1] > 1 else 0,
        0 if hidden is None else hidden.stride(0), hidden.stride(1) if hidden is not None and hidden.shape[1] > 1 else 0,
    )  # fmt: skip
    return picked, counts


@lru_cache(maxsize=64)
def _repeated(kernel: Any, device: torch.device, dtype: torch.dtype, each: int, gone: bool, least: bool) -> Repeated:
    """What is compiled for a device, a type of ratings, parts of a unit, and the options that are there."""
    parts = triton.next_power_of_2(each)
    shape = {"EACH": each, "PARTS": parts, "BLOCK": max(1, BLOCK // parts)}
    return Repeated(kernel, {"GONE": gone, "LEAST": least, **shape, "num_warps": 8})


@jit
def _ordered(x):
    """Whole numbers in the order of numbers ``x``."""
    x = x.to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _rated(ratings, gone, unit, units, GONE: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr):
    """The ratings of units as whole numbers in their order, and which of them are there."""
    part = tl.arange(0, PARTS)[None, :]
    at = unit[:, None] * EACH + part
    there = (unit < units)[:, None] & (part < EACH)
    if GONE:
        there = there & (tl.load(gone + at, mask=there, other=1) == 0)
    rated = _ordered(tl.load(ratings + at, mask=there, other=0.0))
    return tl.max(tl.where(there, rated, -2147483648), 1), tl.max(there.to(tl.int32), 1) != 0


@jit(do_not_specialize=["units", "most", "heads", "count_b", "count_h", "gone_b", "gone_h"])
def _best_units(
    ratings, count, gone, least, picked, counts, units, most, heads, count_b, count_h, gone_b, gone_h,
    GONE: tl.constexpr, LEAST: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    ratings += head * units * EACH
    picked += head * most
    if GONE:
        gone += b * gone_b + h * gone_h
    # how many are wanted of those that agree with the bar in the digits found so far
    left = tl.load(count + b * count_b + h * count_h)
    bar = tl.full([], 0, tl.int32)
    digit = tl.arange(0, 256)
    for place in tl.static_range(24, -1, -8):
        histogram = tl.zeros([256], tl.int32)
        for start in range(0, units, BLOCK):
            rated, there = _rated(ratings, gone, start + tl.arange(0, BLOCK), units, GONE, EACH, PARTS)
            # the sign turned, the order is that of the digits
            rated = rated ^ -2147483648
            if place < 24:
                there = there & ((rated >> (place + 8)) == (bar >> (place + 8)))
            histogram += tl.histogram((rated >> place) & 255, 256, mask=there)
        reached = tl.cumsum(histogram, 0, reverse=True)
        found = tl.max(tl.where(reached >= left, digit, 0), 0)
        left -= tl.sum(tl.where(digit > found, histogram, 0), 0)
        bar = bar | (found << place)
    bar = bar ^ -2147483648
    listed, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, units, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        rated, there = _rated(ratings, gone, unit, units, GONE, EACH, PARTS)
        equal = there & (rated == bar)
        rank = equals + tl.cumsum(equal.to(tl.int32), 0)
        taken = (there & (rated > bar)) | (equal & (rank <= left))
        if LEAST:
            taken = taken & (rated >= _ordered(tl.load(least + b)))
        at = listed + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(picked + at, unit, mask=taken)
        listed += tl.sum(taken.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
    tl.store(counts + head, listed)
    for start in range(listed, most, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(picked + at, tl.zeros([BLOCK], tl.int32) + units, mask=at < most)
