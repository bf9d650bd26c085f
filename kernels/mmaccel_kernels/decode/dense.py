"""The part of the decode kernel that reads keys and values in full precision, flat or dense."""

from __future__ import annotations

from .._softmax import weighed
from .._triton import jit, tl


@jit
def visible(mask, mask_step, column, stored, row, queries, MASKED: tl.constexpr, SINGLE: tl.constexpr):
    """Keys that the mask lets the queries see, ``[1 or BLOCK_M, N]``: without one, all that are ``stored [N]``."""
    if MASKED and SINGLE:
        return (tl.load(mask + column, mask=stored, other=0) != 0)[None, :]
    elif MASKED:
        query = (row % queries)[:, None] * mask_step
        return tl.load(mask + query + column[None, :], mask=stored[None, :], other=0) != 0
    else:
        return stored[None, :]


@jit
def attend(
    state, q, keys, values, key_step, value_step, mask, mask_step, row, queries, begin, end, newest, scale,
    MASKED: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys ``begin`` to ``end``, a tile at a time; query 0 sees ``newest`` of them all.

    ``state`` is largest logit, sum of weights and sum of weighed values so far.
    """
    highest, total, acc = state
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        stored = n < end
        k = tl.load(keys + n[:, None] * key_step + d[None, :], mask=stored[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(
            values + n[:, None] * value_step + dv[None, :], mask=stored[:, None] & (dv < DV)[None, :], other=0.0
        )
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = visible(mask, mask_step, n, stored, row, queries, MASKED, SINGLE)
        if not (MASKED or SINGLE):
            seen = seen & (n[None, :] < newest + (row % queries)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        p, shrink, higher, total = weighed(logits, highest, total)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        highest = higher
    return highest, total, acc
