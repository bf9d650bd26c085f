"""Base of the drafters that copy: they propose what followed the newest tokens of a row before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar


class Drafter(ABC):
    """Proposes tokens that may follow those of one row.

    A drafter belongs to one row of one call. It may index the tokens as they come: between two calls of :meth:`draft` tokens
    are only added. Whatever it proposes is verified, so that a bad draft costs time and changes no answer.
    """

    name: ClassVar[str]

    @abstractmethod
    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``tokens``: prompt and answer so far. Empty if it knows none."""
