"""One step of a softmax over keys that come a tile at a time (Milakov & Gimelshein 2018, arXiv 1805.02867)."""

from __future__ import annotations

from ._triton import jit, tl


@jit
def weighed(logits, highest, total):
    """Weights of one more tile of ``logits [M, N]``, to base 2, and what the weights before shrink by, ``[M]``; then, of all so
    far, the largest logit and the sum of weights, ``[M]`` each."""
    higher = tl.maximum(highest, tl.max(logits, 1))
    # a row that has seen nothing yet
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(highest - base)
    return weight, shrink, higher, total * shrink + tl.sum(weight, 1)


@jit
def gathered(
    part, part_lse, head, row, rows, first, last, state, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The ``state`` of one ``row`` of one ``head`` (largest logit, sum of weights, sum of weighed values), and with it what the
    programs ``first`` to ``last`` have found, weighed by their sums of exponentials to base 2."""
    highest, total, acc = state
    dv = tl.arange(0, BLOCK_DV)
    for start in range(first, last + 1, PARTS):
        program = start + tl.arange(0, PARTS)
        slot = (program + head).to(tl.int64) * rows + row
        found = tl.load(part_lse + slot, mask=program <= last, other=float("-inf"))
        there = (program <= last)[:, None] & (dv < DV)[None, :]
        x = tl.load(part + slot[:, None] * DV + dv[None, :], mask=there, other=0.0)
        higher = tl.maximum(highest, tl.max(found, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(found - base)
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * x, 0)
        highest = higher
    return highest, total, acc


@jit
def leave(out, lse, head, row, rows, state, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Store the ``state`` of one ``row`` of one ``head``: attention, and its log-sum-exp to base e."""
    highest, total, acc = state
    dv = tl.arange(0, BLOCK_DV)
    some = total > 0
    whole = tl.where(some, total, 1.0)
    at = head.to(tl.int64) * rows + row
    tl.store(out + at * DV + dv, (acc / whole).to(out.dtype.element_ty), mask=dv < DV)
    tl.store(lse + at, tl.where(some, (highest + tl.log2(whole)) / 1.4426950408889634, float("-inf")))


__all__ = ["gathered", "leave", "weighed"]
