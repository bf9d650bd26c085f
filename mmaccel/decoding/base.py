"""Base of the drafters that copy: they propose what followed the newest tokens of a row before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..method.limits import Limit, check_options
from .automaton import Store
from .tree import Tree


class Drafter(ABC):
    """Proposes tokens that may follow those of one row.

    A drafter belongs to one row of one call. It may index the tokens as they come: between two calls of :meth:`draft` tokens
    are only added. Whatever it proposes is verified, so that a bad draft costs time and changes no answer. A subclass is a
    dataclass; its fields are its options.
    """

    name: ClassVar[str]
    #: allowed values of options by name, see :data:`~mmaccel.method.limits.Limit`
    limits: ClassVar[Mapping[str, Limit]] = {}
    #: the most tokens of a draft that is a tree, and of a path in it; 0 for drafters of chains alone
    nodes: ClassVar[int] = 0
    longest: ClassVar[int] = 0
    #: how many of the likeliest tokens behind each token that the model reads :meth:`learn` is told
    successors: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def store(cls) -> Store | None:
        """An empty store of what calls leave, which later drafters share as their option ``earlier``; None if a drafter
        of this kind copies from its own row only."""
        return None

    def tree(self, tokens: Sequence[int], most: int) -> Tree:
        """A tree of at most ``most`` tokens that may follow ``tokens``; only of drafters with :attr:`nodes`."""
        raise NotImplementedError

    def learn(self, tokens: Sequence[int], following: Sequence[Sequence[int]]) -> None:
        """Called after every forward with the ``tokens`` that the model has read of the row, drafted ones among them, and the
        likeliest tokens behind each; only of drafters with :attr:`successors`."""

    @abstractmethod
    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``tokens``: prompt and answer so far. Empty if it knows none."""
