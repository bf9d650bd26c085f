"""Bipartite matching as a Triton program: a program keeps a block of rows of one set and streams the other."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import enqueue


def best_match_kernel(x: Tensor, y: Tensor, there: Tensor | None, others: bool) -> tuple[Tensor, Tensor]:
    """:func:`.best_match` in one launch."""
    rows, a, width = x.shape
    x, y = x.contiguous(), y.contiguous()
    score = torch.empty(rows, a, device=x.device)
    place = torch.empty(rows, a, dtype=torch.long, device=x.device)
    mask = y if there is None else there.contiguous().view(torch.uint8)
    tile = tiles(x.element_size())
    grid = (triton.cdiv(a, tile["BLOCK_A"]), rows)
    enqueue(_best_match, grid, x, y, mask, score, place, a, y.shape[1], width, there is not None, others, **tile)
    return score, place


def tiles(bytes_each: int) -> dict[str, int]:
    """The tile sizes that are shipped, by the size of a number: full float32 products leave no room for larger ones."""
    side = 64 if bytes_each == 4 else 128
    return {"BLOCK_A": side, "BLOCK_B": side, "BLOCK_D": 32, "num_warps": 4 if bytes_each == 4 else 8}


@jit(do_not_specialize=["a", "b"])
def _best_match(
    x, y, there, score, place, a, b, width,
    MASKED: tl.constexpr, OTHERS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    k = tl.arange(0, BLOCK_D)
    mine = x + (row * a + i)[:, None] * width + k
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK_A], tl.int32)
    for left in range(0, b, BLOCK_B):
        j = left + tl.arange(0, BLOCK_B)
        theirs = y + (row * b + j)[None, :] * width + k[:, None]
        product = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
        for start in range(0, width, BLOCK_D):
            inside = k < width - start
            part = tl.load(mine + start, mask=(i < a)[:, None] & inside, other=0.0)
            other = tl.load(theirs + start, mask=(j < b)[None, :] & inside[:, None], other=0.0)
            product = tl.dot(part, other, product, input_precision="ieee")
        # added, not chosen: one predicate a product would not fit AMD's scalar registers
        shut = tl.where(j < b, 0.0, float("-inf"))
        if MASKED:
            shut = tl.where(tl.load(there + row * b + j, mask=j < b, other=0) != 0, 0.0, float("-inf"))
        product += shut[None, :]
        if OTHERS:
            product = tl.where(i[:, None] == j[None, :], float("-inf"), product)
        top, at = tl.max(product, 1, return_indices=True)
        # strictly better: of equals the lower place was there first
        where = tl.where(top > best, left + at, where)
        best = tl.maximum(best, top)
    tl.store(score + row * a + i, best, mask=i < a)
    tl.store(place + row * a + i, where, mask=i < a)
