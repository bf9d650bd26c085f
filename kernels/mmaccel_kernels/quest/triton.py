"""Bounds of pages as a Triton program: every page is read once, for all query heads of its key head."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import enqueue

#: pages of one program
BLOCK = 32


def page_bounds_kernel(query: Tensor, extremes: Tensor, join: str) -> Tensor:
    """:func:`.page_bounds` in one launch."""
    batch, kv, pages, width = extremes.shape
    query, extremes = query.contiguous(), extremes.contiguous()
    out = torch.empty(batch, kv, pages, dtype=torch.float32, device=query.device)
    enqueue(
        _page_bounds, (triton.cdiv(pages, BLOCK), batch * kv), query, extremes, out, pages,
        D=width // 2, GROUPS=query.shape[1] // kv, MEAN=join == "mean", BLOCK=BLOCK,
        BLOCK_D=triton.next_power_of_2(width // 2), num_warps=4,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["pages"])
def _page_bounds(
    query, extremes, out, pages,
    D: tl.constexpr, GROUPS: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    at = (head * pages + page)[:, None] * (2 * D) + d[None, :]
    there = (page < pages)[:, None] & (d < D)[None, :]
    high = tl.load(extremes + at, mask=there, other=0.0).to(tl.float32)
    low = tl.load(extremes + at + D, mask=there, other=0.0).to(tl.float32)
    joined = tl.full([BLOCK], 0.0 if MEAN else float("-inf"), tl.float32)
    for group in range(GROUPS):
        q = tl.load(query + (head * GROUPS + group) * D + d, mask=d < D, other=0.0).to(tl.float32)
        bound = tl.sum(tl.maximum(q, 0.0)[None, :] * high + tl.minimum(q, 0.0)[None, :] * low, axis=1)
        joined = joined + bound / GROUPS if MEAN else tl.maximum(joined, bound)
    tl.store(out + head * pages + page, joined, mask=page < pages)
