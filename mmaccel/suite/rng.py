"""Seeds and random choices that are the same on every machine and in every Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SPLITS = ("train", "val", "test")
"""The splits of the suite. Their seeds live in disjoint ranges, see :func:`item_seed`."""

_INDEX_BITS = 40
_STREAM_BITS = 8


def item_seed(split: str, index: int, stream: int = 0) -> int:
    """The seed of one item: ``split``, ``stream`` and ``index`` side by side in one integer, so no two can collide.

    Parameters
    ----------
    split : one of :data:`SPLITS`.
    index : number of the item within the split, ``0 <= index < 2**40``.
    stream : separates families of items (one per task), ``0 <= stream < 256``.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    if not 0 <= index < 1 << _INDEX_BITS:
        raise ValueError(f"index {index} is outside 0..2**{_INDEX_BITS}")
    if not 0 <= stream < 1 << _STREAM_BITS:
        raise ValueError(f"stream {stream} is outside 0..2**{_STREAM_BITS}")
    return ((SPLITS.index(split) << _STREAM_BITS) | stream) << _INDEX_BITS | index


class Rng:
    """Random choices built on ``random.Random.random`` alone, the one sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._next = random.Random(seed).random

    def unit(self) -> float:
        """A float in [0, 1)."""
        return self._next()

    def between(self, low: float, high: float) -> float:
        """A float in [low, high)."""
        return low + (high - low) * self._next()

    def integer(self, low: int, high: int) -> int:
        """An integer in low..high, both ends included."""
        return low + int(self._next() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._next() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(self._next() * len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """All options in random order."""
        rest = list(options)
        for last in range(len(rest) - 1, 0, -1):
            other = int(self._next() * (last + 1))
            rest[last], rest[other] = rest[other], rest[last]
        return rest

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different options in random order."""
        return self.shuffled(options)[:count]
