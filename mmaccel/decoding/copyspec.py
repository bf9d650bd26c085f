"""CopySpec: copy what followed the newest tokens where they occurred first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Drafter
from .ngrams import FirstPlaces


@dataclass(eq=False)
class CopySpec(Drafter):
    """Copy what followed the first earlier occurrence of the newest ``gamma`` tokens.

    *CopySpec: Accelerating LLMs with Speculative Copy-and-Paste Without Compromising Quality*, arXiv 2502.08923.

    Parameters
    ----------
    gamma : tokens that have to occur again.
    """

    name = "copyspec"
    limits = {"gamma": "[1, inf)"}

    gamma: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places = FirstPlaces(self.gamma)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        after = self._places.find(tokens)
        return [] if after is None else list(tokens[after : after + most])
