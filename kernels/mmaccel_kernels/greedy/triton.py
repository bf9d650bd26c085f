"""Parts of the programs that pick one token after the other, a launch each.

Every program of a row finds the same pick, the best of what the blocks of the row have left for this turn in ``value`` and
``place``, ``[2, rows, blocks]`` each; what it leaves itself goes to the other half, for the next turn.
"""

from __future__ import annotations

from .._triton import jit, tl


@jit
def best_of(value, place, turn, row, rows, blocks, BLOCKS: tl.constexpr):
    """The slot of the best of all blocks, the first of equals, and its value."""
    at = (turn % 2 * rows + row) * blocks
    block = tl.arange(0, BLOCKS)
    best, first = tl.max(tl.load(value + at + block, mask=block < blocks, other=float("-inf")), 0, return_indices=True)
    return tl.load(place + at + first), best


@jit
def leave_best(merit, value, place, turn, row, rows, block, blocks, BLOCK: tl.constexpr):
    """The best of this block, ``merit [BLOCK]``, and its slot."""
    leave = ((turn + 1) % 2 * rows + row) * blocks + block
    tl.store(value + leave, tl.max(merit, 0))
    tl.store(place + leave, block * BLOCK + tl.argmax(merit, 0))


@jit
def beside(x, pick, row, i, slots, width, APART: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Products ``[BLOCK]`` of the vectors ``i`` with that of the pick and, if ``APART``, their largest differences from it."""
    cosine, apart = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK_D):
        k = start + tl.arange(0, BLOCK_D)
        here = (i < slots)[:, None] & (k < width)
        mine = tl.load(x + (row * slots + i)[:, None] * width + k, mask=here, other=0.0)
        theirs = tl.load(x + (row * slots + pick) * width + k, mask=k < width, other=0.0)
        cosine += tl.sum(mine * theirs[None, :], 1)
        if APART:
            apart = tl.maximum(apart, tl.max(tl.abs(mine - theirs[None, :]), 1))
    return cosine, apart
