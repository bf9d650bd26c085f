"""Max-min selection as Triton programs: all picks in one launch, or one launch a pick."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..copies import first_copies
from ..greedy import block_best, has_room, largest
from ..greedy.triton import beside, best_of, leave_best
from ..launch import enqueue
from ..matching import best_match
from .naive import all_distances, distance, nearest_of, of_copies

#: the most tokens whose distances one program keeps in registers
ONE_PROGRAM = 4096

#: tokens, and their channels at a time, of one program of :func:`_step`
TILE = {"BLOCK": 32, "BLOCK_D": 256}


def max_min_kernel(x: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None) -> Tensor:
    """:func:`.max_min` in one launch if all distances are made and fit one program, else in one launch a pick."""
    rows, slots, width = x.shape
    x, count = x.contiguous(), count.to(device=x.device, dtype=torch.int32)
    picked, first = torch.zeros(rows, slots, dtype=torch.uint8, device=x.device), first_copies(x, valid)
    if has_room(x) and slots <= ONE_PROGRAM:
        away = all_distances(x, first, noise)
        nearest = nearest_of(away, valid).masked_fill(~valid, -torch.inf)
        size = triton.next_power_of_2(slots)
        warps = max(1, min(16, size // 128))
        enqueue(_pick_all, (rows,), away, nearest, count, picked, slots, BLOCK=size, num_warps=warps)
        return picked.bool()
    cosine, place = best_match(x, x, valid, others=True)
    cosine = cosine.scatter_reduce(1, place, cosine.masked_fill(~valid, -torch.inf), "amax")
    nearest = of_copies(distance(cosine, noise), first)
    nearest = nearest.masked_fill(~valid, -torch.inf)
    value, place = block_best(nearest, TILE["BLOCK"])
    blocks = value.shape[-1]
    for turn in range(largest(count, most)):
        enqueue(
            _step, (blocks, rows), x, nearest, value, place, count, picked, turn, slots, width, blocks, noise,
            BLOCKS=triton.next_power_of_2(blocks), **TILE,
        )  # fmt: skip
    return picked.bool()


@jit(do_not_specialize=["slots"])
def _pick_all(away, nearest, count, picked, slots, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    near = tl.load(nearest + row * slots + i, mask=i < slots, other=float("-inf"))
    taken = tl.zeros([BLOCK], tl.int32)
    for turn in range(0, tl.load(count + row)):
        pick = tl.argmax(near, 0)
        taken = tl.where(i == pick, 1, taken)
        far = tl.load(away + (row * slots + pick) * slots + i, mask=i < slots, other=0.0)
        # the first pick's own measure is not a distance to a picked one
        left = tl.where(turn == 0, far, tl.minimum(near, far))
        near = tl.where((i == pick) | (near == float("-inf")), float("-inf"), left)
    tl.store(picked + row * slots + i, taken, mask=i < slots)


@jit(do_not_specialize=["turn", "slots", "blocks"])
def _step(
    x, nearest, value, place, count, picked, turn, slots, width, blocks, noise,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, rows, block = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(0)
    if turn < tl.load(count + row):
        pick, _ = best_of(value, place, turn, row, rows, blocks, BLOCKS)
        i = block * BLOCK + tl.arange(0, BLOCK)
        cosine, apart = beside(x, pick, row, i, slots, width, True, BLOCK, BLOCK_D)
        away = tl.where((1.0 - cosine < noise) | (apart == 0.0), 0.0, 1.0 - cosine)
        near = tl.load(nearest + row * slots + i, mask=i < slots, other=float("-inf"))
        left = tl.where(turn == 0, away, tl.minimum(near, away))
        near = tl.where((i == pick) | (near == float("-inf")), float("-inf"), left)
        tl.store(nearest + row * slots + i, near, mask=i < slots)
        tl.store(picked + row * slots + i, 1, mask=i == pick)
        leave_best(near, value, place, turn, row, rows, block, blocks, BLOCK)
