"""Parts of the programs that pick one token after the other, a launch each."""

from __future__ import annotations

from .._triton import jit, tl


@jit
def best_of(value, place, at, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The slot of the best of all blocks, the first of equals, and its value."""
    block = tl.arange(0, BLOCKS)
    best, first = tl.max(tl.load(value + at + block, mask=block < blocks, other=float("-inf")), 0, return_indices=True)
    return tl.load(place + at + first), best
