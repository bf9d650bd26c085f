"""Logits in a low dimension as a Triton program: every key is read once, for all query heads of its key head."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import enqueue

#: entries of keys that a program holds
HELD = 4096


def low_rank_logits_kernel(query: Tensor, basis: Tensor, keys: Tensor, join: str) -> Tensor:
    """:func:`.low_rank_logits` in one launch."""
    batch, kv, number, rank = keys.shape
    query, basis, keys = query.contiguous(), basis.contiguous(), keys.contiguous()
    out = torch.empty(batch, kv, number, dtype=torch.float32, device=query.device)
    block_r = triton.next_power_of_2(rank)
    block = max(32, HELD // block_r)
    enqueue(
        _low_rank_logits, (triton.cdiv(number, block), batch * kv), query, basis, keys, out, number,
        D=query.shape[2], R=rank, GROUPS=query.shape[1] // kv, MEAN=join == "mean", BLOCK=block, BLOCK_R=block_r,
        STEP=min(32, triton.next_power_of_2(query.shape[2])), num_warps=4,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["number"])
def _low_rank_logits(
    query, basis, keys, out, number,
    D: tl.constexpr, R: tl.constexpr, GROUPS: tl.constexpr, MEAN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, BLOCK_R)
    there = (key < number)[:, None] & (r < R)[None, :]
    k = tl.load(keys + (head * number + key)[:, None] * R + r[None, :], mask=there, other=0.0).to(tl.float32)
    joined = tl.full([BLOCK], 0.0 if MEAN else float("-inf"), tl.float32)
    for group in range(GROUPS):
        low = tl.zeros([BLOCK_R], tl.float32)
        for start in range(0, D, STEP):
            d = start + tl.arange(0, STEP)
            q = tl.load(query + (head * GROUPS + group) * D + d, mask=d < D, other=0.0).to(tl.float32)
            inside = (d < D)[:, None] & (r < R)[None, :]
            component = tl.load(basis + (head * D + d)[:, None] * R + r[None, :], mask=inside, other=0.0)
            low += tl.sum(q[:, None] * component.to(tl.float32), axis=0)
        logit = tl.sum(k * low[None, :], axis=1)
        joined = joined + logit / GROUPS if MEAN else tl.maximum(joined, logit)
    tl.store(out + head * number + key, joined, mask=key < number)
