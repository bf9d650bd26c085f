"""SAM decoding: copy what followed the longest suffix that occurred before, in the row or in earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .automaton import Answers, SuffixAutomaton
from .base import Drafter

#: tokens that are looked up in earlier answers; a longer match is as good as one of these
_CONTEXT = 64


@dataclass(eq=False)
class SAMDecoding(Drafter):
    """Copy what followed the first occurrence of the longest suffix of a row, found by a suffix automaton.

    *SAM Decoding: Speculative Decoding via Suffix Automaton*, arXiv 2411.10666.

    A match in the row itself that has fewer tokens after it than asked for is shortened to one that has more. One in earlier
    answers is taken if it is longer than the one in the row by more than ``bias``.

    Parameters
    ----------
    earlier : answers of earlier calls, :meth:`store`.
    least : tokens that have to match. The paper uses another drafter where fewer do; here nothing is drafted.
    bias : how many tokens more have to match in an earlier answer.
    """

    name = "samdecoding"
    limits = {"least": "[1, inf)", "bias": "[0, inf)"}

    earlier: Answers[SuffixAutomaton] | None = None
    least: int = 5
    bias: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._own = SuffixAutomaton()

    @classmethod
    def store(cls) -> Answers[SuffixAutomaton]:
        return Answers(SuffixAutomaton)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        own = self.match(tokens)
        # the first of the longest; the newest answers come first
        state, length, answers = 0, 0, self._own
        for automaton in self.earlier.automata if self.earlier is not None else ():
            found, matched = automaton.match(tokens[-_CONTEXT:])
            if matched > length:
                state, length, answers = found, matched, automaton
        if max(own, length - self.bias) < self.least:
            return []
        if own >= length - self.bias:
            return self.copy(most)
        copied = answers.text[answers.end[state] : answers.end[state] + most]
        return copied[: copied.index(-1)] if -1 in copied else copied

    def match(self, tokens: Sequence[int]) -> int:
        """Index the new ones of ``tokens``; the length of their longest suffix that occurs before."""
        own = self._own
        for token in tokens[len(own.text) :]:
            own.extend(token)
        return own.length[own.link[own.last]] if own.last else 0

    def copy(self, most: int) -> list[int]:
        """At most ``most`` tokens from behind the match of :meth:`match`. As in the authors' program the newest token is not
        copied, and a match is long enough if one token more than asked for follows it."""
        own = self._own
        state, newest = own.link[own.last], len(own.text) - 1
        while own.link[state] > 0 and newest - own.end[state] <= most:
            state = own.link[state]
        return own.text[own.end[state] : min(own.end[state] + most, newest)]
