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


__all__ = ["weighed"]
