"""Index of the first place of every n-gram of a sequence that grows."""

from __future__ import annotations

from collections.abc import Sequence


class FirstPlaces:
    """The first place of every n-gram.

    Parameters
    ----------
    n : tokens of an n-gram.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._after: dict[tuple[int, ...], int] = {}
        self._next = n

    def find(self, tokens: Sequence[int]) -> int | None:
        """The place after the first occurrence of the newest n-gram of ``tokens``, or None if it is new.

        ``tokens`` are those of the call before and some more.
        """
        n, total = self.n, len(tokens)
        for after in range(self._next, total):
            self._after.setdefault(tuple(tokens[after - n : after]), after)
        self._next = max(self._next, total)
        return self._after.get(tuple(tokens[total - n :])) if total > n else None
