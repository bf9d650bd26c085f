"""Greedy determinantal selection as a Triton program, one launch a pick."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..greedy import block_best, has_room, largest
from ..greedy.triton import beside, best_of, leave_best
from ..launch import enqueue
from .naive import first_tokens, products, start

#: tokens, and their channels or picks at a time, of one program
TILE = {"BLOCK": 32, "BLOCK_D": 256, "BLOCK_P": 64}


def greedy_dpp_kernel(
    x: Tensor, quality: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None
) -> Tensor:
    """:func:`.greedy_dpp` in one launch a pick."""
    rows, slots, width = x.shape
    x, quality, count = x.contiguous(), quality.contiguous(), count.to(device=x.device, dtype=torch.int32)
    pairs = products(x, first_tokens(x, quality)) if has_room(x) else None
    left, least, spent = start(x, quality, valid, noise)
    value, place = block_best(torch.where(left > least, left, spent), TILE["BLOCK"])
    blocks, turns = value.shape[-1], largest(count, most)
    picked = torch.zeros(rows, slots, dtype=torch.uint8, device=x.device)
    basis = torch.empty(rows, turns, slots, device=x.device)
    for turn in range(turns):
        enqueue(
            _step, (blocks, rows), x if pairs is None else pairs, quality, left, least, basis, value, place, count, picked,
            turn, turns, slots, width, blocks,
            PAIRS=pairs is not None, BLOCKS=triton.next_power_of_2(blocks), **TILE,
        )  # fmt: skip
    return picked.bool()


@jit(do_not_specialize=["turn", "turns", "slots", "blocks"])
def _step(
    x, quality, left, least, basis, value, place, count, picked, turn, turns, slots, width, blocks,
    PAIRS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row, rows, block = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(0)
    if turn < tl.load(count + row):
        pick, best = best_of(value, place, turn, row, rows, blocks, BLOCKS)
        i = block * BLOCK + tl.arange(0, BLOCK)
        here, at = i < slots, row * slots + i
        if PAIRS:
            cosine = tl.load(x + (row * slots + pick) * slots + i, mask=here, other=0.0)
        else:
            cosine, _ = beside(x, pick, row, i, slots, width, False, BLOCK, BLOCK_D)
        spanned = tl.zeros([BLOCK], tl.float32)
        for start in range(0, turn, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            ours = basis + (row * turns + p) * slots
            theirs = tl.load(ours + pick, mask=p < turn, other=0.0)
            mine = tl.load(ours[:, None] + i, mask=(p < turn)[:, None] & here, other=0.0)
            spanned += tl.sum(theirs[:, None] * mine, 0)
        own = tl.load(quality + at, mask=here, other=0.0)
        e = own * cosine * tl.load(quality + row * slots + pick) - spanned
        # what is spanned has a negative merit, and nothing new to subtract
        e = tl.where(best > 0, e / tl.sqrt(tl.where(best > 0, best, 1.0)), 0.0)
        tl.store(basis + (row * turns + turn) * slots + i, e, mask=here)
        rest = tl.load(left + at, mask=here, other=float("-inf")) - e * e
        rest = tl.where(i == pick, float("-inf"), rest)
        tl.store(left + at, rest, mask=here)
        tl.store(picked + at, 1, mask=i == pick)
        merit = tl.where(rest > tl.load(least + at, mask=here, other=0.0), rest, -1.0 / (1.0 + own))
        merit = tl.where(rest == float("-inf"), float("-inf"), merit)
        leave_best(merit, value, place, turn, row, rows, block, blocks, BLOCK)
