"""Suffix decoding: draft the most frequent continuation of the suffixes of a row, in the row and in earlier answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct
from typing import NamedTuple

from .automaton import Answers, SuffixAutomaton
from .base import Drafter

_FLOAT32 = Struct("f")


def _rounded(x: float) -> float:
    """``x`` in float32, in which the authors' program computes, so that equal scores are equal here too."""
    found: float = _FLOAT32.unpack(_FLOAT32.pack(x))[0]
    return found


class Chain(NamedTuple):
    """A draft, the probability of each of its tokens given all before, their sum, and how many tokens matched."""

    tokens: list[int]
    probabilities: list[float]
    score: float = 0.0
    matched: int = 0


class CountedSuffixes(SuffixAutomaton):
    """Suffix automaton that knows how often every substring of at most ``depth`` tokens occurs.

    It does what a suffix tree of that depth does, in memory that does not grow with the depth.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.count = [0]
        #: tokens after a state, the most frequent first
        self.ranked: list[list[int]] = [[]]
        #: the state of the longest suffix of at most ``depth`` tokens, and its length
        self._suffix = (0, 0)

    def begin(self) -> None:
        super().begin()
        self._suffix = (0, 0)

    def extend(self, token: int) -> None:
        super().extend(token)
        state, length = self._within(*self._suffix)
        before = state
        while before:
            ranked = self.ranked[before]
            if not ranked or ranked[0] != token:
                self._rank(before, token)
            before = self.link[before]
        self._suffix = state, _ = self._within(self.next[state][token], min(length + 1, self.depth))
        while state:
            self.count[state] += 1
            state = self.link[state]

    def continued(self, tokens: Sequence[int], most: int, factor: float, offset: float, least: float) -> Chain:
        """The best continuation of ``tokens``; see :class:`SuffixDecoding`."""
        # all tokens are no match: the program asks for one that begins after the first
        known = min(self.depth, len(tokens) - 1)
        state, length = self.match(tokens[len(tokens) - known :]) if known > 0 else (0, 0)
        best = Chain([], [], 0.0, length)
        while state:
            shortest = self.length[self.link[state]] + 1
            followed, chances = self._frequent(state, min(most, self.depth - shortest), least)
            scores = list(accumulate(chances, lambda a, b: _rounded(a + b), initial=0.0))
            if scores[-1] > best.score:
                for matched in range(min(length, self.length[state]), shortest - 1, -1):
                    limit = max(min(len(followed), int(matched * factor + offset + 1e-6), self.depth - matched), 0)
                    if scores[limit] > best.score:
                        best = Chain(followed[:limit], chances[:limit], scores[limit], matched)
            state = self.link[state]
        return best

    def _within(self, state: int, length: int) -> tuple[int, int]:
        """The state of the suffix of ``length`` tokens of what is in ``state``."""
        while state and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state, length

    def _frequent(self, state: int, most: int, least: float) -> tuple[list[int], list[float]]:
        """The most frequent tokens after a state one by one, while their probability is at least ``least``."""
        tokens: list[int] = []
        chances: list[float] = []
        chance = 1.0
        while len(tokens) < most and self.ranked[state]:
            token = self.ranked[state][0]
            following = self.next[state][token]
            if self.count[following] != self.count[state]:
                chance = _rounded(chance * _rounded(self.count[following] / self.count[state]))
            if chance < least:
                break
            tokens.append(token)
            chances.append(chance)
            state = following
        return tokens, chances

    def _rank(self, state: int, token: int) -> None:
        """Move ``token``, which is not the first after ``state`` and whose count there is about to rise by one, where the
        authors' program would have it: in front of those that it equals then, if it was the first of those that it equals
        now, else behind them."""
        ranked, count, following = self.ranked[state], self.count, self.next[state]
        now = count[following[token]]
        if not now:
            ranked.append(token)
        else:
            place = ranked.index(token)
            before = count[following[ranked[place - 1]]]
            if before <= now + 1:
                first = bisect_left(ranked, -before, hi=place, key=lambda other: -count[following[other]])
                ranked.insert(first, ranked.pop(place))

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self.count.append(0)
        self.ranked.append([])
        return super()._add(following, link, length, end)

    def _split(self, state: int, length: int) -> int:
        new = super()._split(state, length)
        self.count[new] = self.count[state]
        self.ranked[new] = list(self.ranked[state])
        return new


@dataclass(eq=False)
class SuffixDecoding(Drafter):
    """Draft the most frequent continuation of the suffixes of a row, among those in the row and in earlier answers.

    *SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications*, NeurIPS 2025, arXiv 2411.04975.

    For every suffix that occurs, of ``L`` tokens, a chain of at most ``factor * L + offset`` tokens: the most frequent next
    token, again and again. The probability of a token is the product of the shares so far, a share being the count of a
    substring with the token by that without it; a chain ends before the first below ``least``. The chain whose probabilities
    have the largest sum is the draft, of equal ones that of the longest suffix, and that of the row rather than of answers.

    Parameters
    ----------
    earlier : answers of earlier calls, :meth:`store`.
    depth : tokens of a suffix and its continuation.
    factor, offset : how long a draft may be for a suffix.
    least : probability of the least probable token.

    Paper and program: the program has trees of suffixes, here counts are in a suffix automaton, which gives the same chains.
    Drafts that are trees are not offered.
    """

    name = "suffixdecoding"
    limits = {"depth": "[2, inf)", "factor": "[0, inf)", "least": "[0, 1]"}

    earlier: Answers[CountedSuffixes] | None = None
    depth: int = 64
    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._own = self.index()

    @classmethod
    def store(cls) -> Answers[CountedSuffixes]:
        return Answers(lambda: CountedSuffixes(64))

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        for token in tokens[len(self._own.text) :]:
            self._own.extend(token)
        indexes = [self._own, *(self.earlier.automata if self.earlier is not None else ())]
        newest = tokens[-self.depth - 1 :]
        return max((self.chain(one, newest, most) for one in indexes), key=lambda chain: chain.score).tokens

    def index(self) -> CountedSuffixes:
        """An empty index of sequences."""
        return CountedSuffixes(self.depth)

    def chain(self, index: CountedSuffixes, tokens: Sequence[int], most: int) -> Chain:
        """The best continuation of ``tokens`` by what ``index`` has counted."""
        return index.continued(tokens, most, self.factor, self.offset, _rounded(self.least))
