"""Compaction as a Triton program: a program makes a few rows of the output, keys and values."""

from __future__ import annotations

from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import enqueue
from .naive import Compacted, Plan, compact_plan, plan

#: output rows, and channels at a time, of one program
TILE = {"BLOCK": 16, "BLOCK_D": 128}


def compact_kernel(
    keys: Tensor, values: Tensor, kept: Tensor | Plan, owner: Tensor | None, weight: Tensor | None, total: int | None
) -> Compacted:
    """:func:`.compact` in one launch."""
    if not isinstance(kept, Plan):
        total = int(kept.sum()) if total is None else total
        kept = compact_plan(kept, total) if owner is None else Plan(*plan(kept, owner, total), kept.sum(-1), total)
    source, begin, lengths, total = kept
    # rows may lie anywhere, with room behind those of a head; only their channels lie together
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))
    out = Compacted(keys.new_empty(total, keys.shape[-1]), values.new_empty(total, values.shape[-1]), lengths)
    if total == 0:
        return out
    factor = keys if weight is None else weight.contiguous()
    enqueue(
        _compact, (triton.cdiv(total, TILE["BLOCK"]),),
        keys, values, source, begin, factor, out.keys, out.values, total, keys.shape[-1], values.shape[-1],
        keys.shape[1], keys.shape[2], *keys.stride()[:3], *values.stride()[:3],
        MERGE=owner is not None, WEIGHED=weight is not None, **TILE, num_warps=4,
    )  # fmt: skip
    return out


@jit
def _offset(row, heads, slots, to_row, to_head, to_slot):
    """Where slots are whose numbers count those of all heads and rows of the batch, by the steps to the next of each."""
    head = row // slots
    return head // heads * to_row + head % heads * to_head + row % slots * to_slot


@jit(do_not_specialize=["total", "slots"])
def _compact(
    keys, values, source, begin, weight, new_keys, new_values, total, key_width, value_width, heads, slots,
    key_row, key_head, key_slot, value_row, value_head, value_slot,
    MERGE: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for both in tl.static_range(2):
        x, out, width = (keys, new_keys, key_width) if both == 0 else (values, new_values, value_width)
        to_row, to_head = (key_row, key_head) if both == 0 else (value_row, value_head)
        to_slot = key_slot if both == 0 else value_slot
        for start in range(0, width, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            inside = (o < total)[:, None] & (d < width)
            if MERGE:
                first = tl.load(begin + o, mask=o < total, other=0)
                last = tl.load(begin + o + 1, mask=o < total, other=0)
                made = tl.zeros([BLOCK, BLOCK_D], tl.float32)
                for turn in range(0, tl.max(last - first, 0)):
                    member = first + turn < last
                    row = tl.load(source + first + turn, mask=member, other=0)
                    here = member[:, None] & (d < width)
                    at = _offset(row, heads, slots, to_row, to_head, to_slot)
                    part = tl.load(x + at[:, None] + d, mask=here, other=0.0).to(tl.float32)
                    if WEIGHED:
                        part *= tl.load(weight + row, mask=member, other=0.0)[:, None]
                    made += part
            else:
                row = tl.load(source + o, mask=o < total, other=0)
                at = _offset(row, heads, slots, to_row, to_head, to_slot)
                made = tl.load(x + at[:, None] + d, mask=inside, other=0.0)
            tl.store(out + o[:, None] * width + d, made, mask=inside)
