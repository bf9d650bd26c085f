"""Votes of query heads as Triton programs: every key is read once, for all query heads of its key head."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import enqueue, workspace

#: entries of keys that a program holds
HELD = 4096
#: slots of a program that adds votes up, and what it looks at together of what others have found
SUMMED, FOUND = 256, 64


def votes_kernel(query: Tensor, keys: Tensor, slots: Tensor, interleaved: bool) -> Tensor:
    """:func:`.votes` in two launches: logits with the sums of their exponentials block by block, and the votes."""
    (batch, heads, width), (kv, own), number = query.shape, (keys.shape[1], slots.shape[1]), slots.shape[2]
    query, slots = query.contiguous(), slots.contiguous()
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    block_d = triton.next_power_of_2(width)
    block = max(16, HELD // block_d)
    blocks = triton.cdiv(number, block)
    logits, sums = workspace(query, batch * heads * number, batch * heads * blocks, use="votes")
    out = torch.empty(batch, own, number, dtype=torch.float32, device=query.device)
    enqueue(
        _logits, (blocks, batch * kv), query, keys, slots, logits, sums, number, blocks, kv, *keys.stride()[:3],
        D=width, GROUPS=heads // kv, OWN=own == kv, INTERLEAVED=interleaved, BLOCK=block, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    enqueue(
        _votes, (triton.cdiv(number, SUMMED), batch * own), logits, sums, out, number, blocks,
        HEADS=heads // own, BLOCK=SUMMED, FOUND=FOUND, num_warps=4,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["number", "blocks", "kv", "keys_b", "keys_h", "keys_k"])
def _logits(
    query, keys, slots, logits, sums, number, blocks, kv, keys_b, keys_h, keys_k,
    D: tl.constexpr, GROUPS: tl.constexpr, OWN: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    b, h = head // kv, head % kv
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + (head if OWN else b) * number + place, mask=place < number, other=-1)
    there = slot >= 0
    d = tl.arange(0, BLOCK_D)
    at = slot.to(tl.int64)[:, None] * keys_k + d[None, :]
    key = tl.load(keys + b * keys_b + h * keys_h + at, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    for group in range(GROUPS):
        row = b * kv * GROUPS + (group * kv + h if INTERLEAVED else h * GROUPS + group)
        q = tl.load(query + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        # to base 2; a head's logits lie beside those of the heads that vote with it
        logit = tl.where(there, tl.sum(key * q[None, :], axis=1) * 1.4426950408889634, float("-inf"))
        highest = tl.max(logit, 0)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.exp2(logit - base), 0)
        some = total > 0
        left = head * GROUPS + group
        tl.store(logits + left * number + place, logit, mask=place < number)
        tl.store(
            sums + left * blocks + tl.program_id(0),
            tl.where(some, base + tl.log2(tl.where(some, total, 1.0)), float("-inf")),
        )


@jit(do_not_specialize=["number", "blocks"])
def _votes(logits, sums, out, number, blocks, HEADS: tl.constexpr, BLOCK: tl.constexpr, FOUND: tl.constexpr):
    voter = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    votes = tl.zeros([BLOCK], tl.float32)
    for one in range(HEADS):
        left = voter * HEADS + one
        highest = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        for start in range(0, blocks, FOUND):
            block = start + tl.arange(0, FOUND)
            found = tl.load(sums + left * blocks + block, mask=block < blocks, other=float("-inf"))
            higher = tl.maximum(highest, tl.max(found, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(found - base), 0)
            highest = higher
        logit = tl.load(logits + left * number + place, mask=place < number, other=float("-inf"))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        votes += tl.exp2(logit - base) / tl.where(total > 0, total, 1.0)
    tl.store(out + voter * number + place, votes, mask=place < number)
