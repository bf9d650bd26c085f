"""Suffix decoding: draft the most frequent continuation of the suffixes of a row, in the row and in earlier answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from struct import Struct
from typing import NamedTuple

from .automaton import Answers, SuffixAutomaton
from .base import Drafter
from .tree import Tree

_FLOAT32 = Struct("f")


def _rounded(x: float) -> float:
    """``x`` in float32, in which the authors' program computes, so that equal scores are equal here too."""
    found: float = _FLOAT32.unpack(_FLOAT32.pack(x))[0]
    return found


class Continuation(NamedTuple):
    """A draft, the probability of the path to each of its tokens, their sum, how many tokens matched, and of a tree the parents
    of tokens as in :class:`.tree.Tree`."""

    tokens: list[int]
    probabilities: list[float]
    score: float = 0.0
    matched: int = 0
    parents: list[int] = []


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
        state, length = self.within(*self._suffix)
        before = state
        while before:
            ranked = self.ranked[before]
            if not ranked or ranked[0] != token:
                self._rank(before, token)
            before = self.link[before]
        self._suffix = state, _ = self.within(self.next[state][token], min(length + 1, self.depth))
        while state:
            self.count[state] += 1
            state = self.link[state]

    @property
    def suffix(self) -> tuple[int, int]:
        """The longest suffix of at most ``depth`` tokens of the newest sequence: its state and its length."""
        return self._suffix

    def branched(self, state: int, length: int, most: int, factor: float, offset: float, least: float) -> Continuation:
        """The best tree of continuations of ``length`` tokens that are in ``state``; see :class:`SuffixDecoding`."""
        best = Continuation([], [], 0.0, length)
        while state:
            made = -1
            for matched in range(min(length, self.length[state]), self.length[self.link[state]], -1):
                limit, deep = min(most, int(matched * factor + offset + 1e-6)), self.depth - matched
                # no probability is larger than 1, and shorter matches have no larger trees
                if limit <= best.score:
                    break
                if made < limit or deep < limit:
                    nodes, chances, parents = self._likeliest(state, limit, deep, least)
                    made = limit if deep >= limit else -1
                score = list(accumulate(chances[:limit], lambda a, b: _rounded(a + b), initial=0.0))[-1]
                if score > best.score:
                    best = Continuation(nodes[:limit], chances[:limit], score, matched, parents[:limit])
            state = self.link[state]
        return best

    def _likeliest(self, state: int, most: int, deep: int, least: float) -> tuple[list[int], list[float], list[int]]:
        """The ``most`` likeliest of all paths after a state of at most ``deep`` tokens and a probability of at least ``least``:
        tokens, probabilities and parents."""
        tokens, chances, parents = list[int](), list[float](), list[int]()
        # of equal probability the first that were found
        waiting: list[tuple[float, int, int, int, int, int]] = []
        found = 0

        def add(state: int, chance: float, parent: int, depth: int) -> None:
            nonlocal found
            for token in self.ranked[state] if depth < deep else ():
                following = self.next[state][token]
                share = _rounded(self.count[following] / self.count[state])
                if (after := _rounded(chance * share)) >= least:
                    heappush(waiting, (-after, found, following, token, parent, depth + 1))
                    found += 1

        add(state, 1.0, -1, 0)
        while waiting and len(tokens) < most:
            chance, _, state, token, parent, depth = heappop(waiting)
            tokens.append(token)
            chances.append(-chance)
            parents.append(parent)
            add(state, -chance, len(tokens) - 1, depth)
        return tokens, chances, parents

    def continued(self, state: int, length: int, most: int, factor: float, offset: float, least: float) -> Continuation:
        """The best chain behind ``length`` tokens that are in ``state``; see :class:`SuffixDecoding`."""
        best = Continuation([], [], 0.0, length)
        while state:
            shortest = self.length[self.link[state]] + 1
            followed, chances = self._frequent(state, min(most, self.depth - shortest), least)
            scores = list(accumulate(chances, lambda a, b: _rounded(a + b), initial=0.0))
            if scores[-1] > best.score:
                for matched in range(min(length, self.length[state]), shortest - 1, -1):
                    limit = max(min(len(followed), int(matched * factor + offset + 1e-6), self.depth - matched), 0)
                    if scores[limit] > best.score:
                        best = Continuation(followed[:limit], chances[:limit], scores[limit], matched)
            state = self.link[state]
        return best

    def within(self, state: int, length: int) -> tuple[int, int]:
        """The suffix of ``length`` tokens of what is in ``state``: its state and its length."""
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

    A draft that is a tree has the most probable of all continuations, as many as a chain for the same suffix may have tokens.

    Paper and program: the program has trees of suffixes, here counts are in a suffix automaton, which gives the same drafts,
    but for the order of equal probabilities in a tree.
    """

    name = "suffixdecoding"
    nodes = 16
    longest = 16
    limits = {"depth": "[2, inf)", "factor": "[0, inf)", "least": "[0, 1]"}

    earlier: Answers[CountedSuffixes] | None = None
    depth: int = 64
    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._own = self.index()
        self._read = 0
        #: by automaton of earlier answers the longest suffix of at most ``depth`` tokens that occurs there
        self._found: dict[int, tuple[CountedSuffixes, int, int]] = {}

    @classmethod
    def store(cls) -> Answers[CountedSuffixes]:
        return Answers(lambda: CountedSuffixes(64))

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        return self._best(tokens, most, False).tokens

    def tree(self, tokens: Sequence[int], most: int) -> Tree:
        best = self._best(tokens, most, True)
        return Tree(best.tokens, best.parents)

    def _best(self, tokens: Sequence[int], most: int, branched: bool) -> Continuation:
        for token in tokens[len(self._own.text) :]:
            self._own.extend(token)
        found = [(self._own, *self._own.suffix), *self._in_answers(tokens)]
        # all tokens are no match: the program asks for one that begins after the first
        longest = min(self.depth, len(tokens) - 1)
        places = [(index, *index.within(state, min(length, longest))) for index, state, length in found]
        return max((self.best(*place, most, branched) for place in places), key=lambda best: best.score)

    def _in_answers(self, tokens: Sequence[int]) -> list[tuple[CountedSuffixes, int, int]]:
        """Of every automaton of earlier answers the longest suffix of ``tokens`` that occurs there."""
        automata = self.earlier.automata if self.earlier is not None else ()
        before, self._found = self._found, {}
        for one in automata:
            _, state, length = before.get(id(one), (one, 0, 0))
            for token in tokens[self._read if id(one) in before else -self.depth :]:
                # an answer that was added since may have split the state
                state, length = one.step(*one.within(state, length), token)
                state, length = one.within(state, min(length, self.depth))
            self._found[id(one)] = one, state, length
        self._read = len(tokens)
        return list(self._found.values())

    def index(self) -> CountedSuffixes:
        """An empty index of sequences."""
        return CountedSuffixes(self.depth)

    def best(self, index: CountedSuffixes, state: int, length: int, most: int, branched: bool) -> Continuation:
        """The best chain, or ``branched`` the best tree, behind ``length`` tokens that are in ``state`` of ``index``."""
        grow = index.branched if branched else index.continued
        return grow(state, length, most, self.factor, self.offset, _rounded(self.least))
