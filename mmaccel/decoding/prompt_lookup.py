"""Prompt lookup: copy what followed the newest n-gram where it occurred first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Drafter
from .ngrams import FirstPlaces


@dataclass(eq=False)
class PromptLookup(Drafter):
    """Copy what followed the first earlier occurrence of the newest tokens, of the longest n-gram that occurred.

    *Prompt Lookup Decoding*, github.com/apoorvumang/prompt-lookup-decoding, 2023. LLMA (arXiv 2304.04487) copies alike.

    Parameters
    ----------
    ngram : tokens of the longest n-gram; shorter ones are looked up where it is new.
    whole : whether a draft shorter than what was asked for counts as none, as in the authors' program.
    """

    name = "promptlookup"
    limits = {"ngram": "[1, inf)"}

    ngram: int = 3
    whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places = [FirstPlaces(n) for n in range(self.ngram, 0, -1)]

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        found: list[int] = []
        # every index sees all tokens
        for places in self._places:
            after = places.find(tokens)
            if after is None or found:
                continue
            if self.whole and (after + most > len(tokens) or after >= len(tokens) - places.n):
                continue
            found = list(tokens[after : after + most])
        return found
