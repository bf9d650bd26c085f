"""Base of the drafters that copy: they propose what followed the newest tokens of a row before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..method.limits import Limit, check_options
from .automaton import Answers


class Drafter(ABC):
    """Proposes tokens that may follow those of one row.

    A drafter belongs to one row of one call. It may index the tokens as they come: between two calls of :meth:`draft` tokens
    are only added. Whatever it proposes is verified, so that a bad draft costs time and changes no answer. A subclass is a
    dataclass; its fields are its options.
    """

    name: ClassVar[str]
    #: allowed values of options by name, see :data:`~mmaccel.method.limits.Limit`
    limits: ClassVar[Mapping[str, Limit]] = {}

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def store(cls) -> Answers[Any] | None:
        """An empty store of earlier answers, which drafters of several calls share as their option ``earlier``; None if a
        drafter of this kind copies from its own row only."""
        return None

    @abstractmethod
    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``tokens``: prompt and answer so far. Empty if it knows none."""
