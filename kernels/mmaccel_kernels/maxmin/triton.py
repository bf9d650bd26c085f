"""Max-min selection as Triton programs: all picks in one launch, or one launch a pick."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..copies import first_copies
from ..greedy import block_best, largest
from ..greedy.triton import beside, best_of, leave_best
from ..launch import enqueue
from ..matching import best_match
from .naive import all_distances, distance, nearest_of, of_copies, opening

#: the most tokens that one program picks from, with what it knows of them in registers
ONE_PROGRAM = 8192
#: distances that are held at once
HELD = 1 << 28

#: tokens, and their channels at a time, of one program of :func:`_step`
TILE = {"BLOCK": 32, "BLOCK_D": 256}


def max_min_kernel(x: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None, limit: Tensor) -> Tensor:
    """:func:`.max_min` in one launch where one program can pick, from all distances, else in one launch a pick."""
    rows, slots, width = x.shape
    if slots <= ONE_PROGRAM:
        some = max(1, HELD // slots**2)
        parts = zip(*(whole.split(some) for whole in (x, valid, count.to(x.device), limit)), strict=True)
        return torch.cat(
            [_one_program(vectors, among, wanted, at_most, noise) for vectors, among, wanted, at_most in parts]
        )
    x, count = x.contiguous(), count.to(device=x.device, dtype=torch.int32)
    first, far = first_copies(x, valid), torch.full_like(limit, -torch.inf, memory_format=torch.contiguous_format)
    # minus infinity is the smaller of any two: what is picked or padding stays out
    left = limit.masked_fill(~valid, -torch.inf).contiguous()
    cosine, place = best_match(x, x, valid, others=True)
    cosine = cosine.scatter_reduce(1, place, cosine.masked_fill(~valid, -torch.inf), "amax")
    merit = opening(of_copies(distance(cosine, noise), first), valid, limit)
    value, place = block_best(merit, TILE["BLOCK"])
    blocks = value.shape[-1]
    for turn in range(largest(count, most)):
        enqueue(
            _step, (blocks, rows), x, left, value, place, count, far, turn, slots, width, blocks, noise,
            BLOCKS=triton.next_power_of_2(blocks), **TILE,
        )  # fmt: skip
    return far


def _one_program(x: Tensor, valid: Tensor, count: Tensor, limit: Tensor, noise: float) -> Tensor:
    """The picks of each row by a program of its own: a pick reads one row of all distances."""
    rows, slots = valid.shape
    away = all_distances(x, first_copies(x, valid), noise)
    merit = opening(nearest_of(away, valid), valid, limit)
    left = limit.masked_fill(~valid, -torch.inf).contiguous()
    far = torch.full_like(left, -torch.inf)
    size = triton.next_power_of_2(slots)
    warps = max(1, min(16, size // 128))
    enqueue(_pick_all, (rows,), away, merit, left, count.int(), far, slots, BLOCK=size, num_warps=warps)
    return far


@jit(do_not_specialize=["slots"])
def _pick_all(away, merit, left, count, far, slots, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    best = tl.load(merit + row * slots + i, mask=i < slots, other=float("-inf"))
    near = tl.load(left + row * slots + i, mask=i < slots, other=float("-inf"))
    for _ in range(0, tl.load(count + row)):
        pick = tl.argmax(best, 0)
        tl.store(far + row * slots + i, near, mask=i == pick)
        apart = tl.load(away + (row * slots + pick) * slots + i, mask=i < slots, other=0.0)
        near = tl.where(i == pick, float("-inf"), tl.minimum(near, apart))
        best = near


@jit(do_not_specialize=["turn", "slots", "blocks"])
def _step(
    x, left, value, place, count, far, turn, slots, width, blocks, noise,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, rows, block = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(0)
    if turn < tl.load(count + row):
        pick, _ = best_of(value, place, turn, row, rows, blocks, BLOCKS)
        i = block * BLOCK + tl.arange(0, BLOCK)
        cosine, apart = beside(x, pick, row, i, slots, width, True, BLOCK, BLOCK_D)
        away = tl.where((1.0 - cosine < noise) | (apart == 0.0), 0.0, 1.0 - cosine)
        near = tl.load(left + row * slots + i, mask=i < slots, other=float("-inf"))
        tl.store(far + row * slots + i, near, mask=i == pick)
        near = tl.where(i == pick, float("-inf"), tl.minimum(near, away))
        tl.store(left + row * slots + i, near, mask=i < slots)
        leave_best(near, value, place, turn, row, rows, block, blocks, BLOCK)
