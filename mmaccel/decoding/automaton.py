"""Suffix automaton: an index of all substrings of token sequences that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar


class SuffixAutomaton:
    """Index of all substrings of the sequences that were fed to it.

    A state is a set of substrings that end at the same places; state 0 is the empty one. The longest of them has
    ``length[state]`` tokens, its suffixes of at most ``length[link[state]]`` tokens belong to ``link[state]``, and the first
    place where they end is ``text[: end[state]]``.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        #: all sequences, each behind a -1 but for the first
        self.text: list[int] = []
        #: the whole newest sequence; its link is the longest suffix of it that occurs somewhere else
        self.last = 0

    def begin(self) -> None:
        """Begin another sequence; no substring spans two."""
        if self.text:
            self.text.append(-1)
        self.last = 0

    def extend(self, token: int) -> None:
        """Add one token to the newest sequence; amortised constant time."""
        self.text.append(token)
        state = self.last
        if token in self.next[state]:
            # an earlier sequence begins like this one
            self.last = self._reached(state, token)
            return
        self.last = new = self._add({}, 0, self.length[state] + 1, len(self.text))
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._reached(state, token)

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The longest suffix of ``tokens`` that occurs: its state and its length."""
        state = length = 0
        for token in tokens:
            state, length = self.step(state, length, token)
        return state, length

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix that occurs after one more token: its state and its length."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.end.append(end)
        return len(self.length) - 1

    def _reached(self, state: int, token: int) -> int:
        """The state whose longest substring is that of ``state`` and ``token``; split from a larger one where it has to be."""
        old = self.next[state][token]
        if self.length[old] == self.length[state] + 1:
            return old
        new = self._split(old, self.length[state] + 1)
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = new
            state = self.link[state]
        return new

    def _split(self, state: int, length: int) -> int:
        new = self._add(dict(self.next[state]), self.link[state], length, self.end[state])
        self.link[state] = new
        return new


A = TypeVar("A", bound=SuffixAutomaton)


class Store:
    """Memory that drafters share between calls, passed as their option ``earlier``."""

    def remember(self, tokens: Sequence[int]) -> None:
        """Add a whole answer; a store that is filled otherwise ignores it."""


class Answers(Store, Generic[A]):
    """Answers of earlier calls, indexed by automata; drafters of later calls share it.

    It holds between half of ``most`` tokens and ``most``: the newest answers in one automaton, those before in another, which
    is dropped as a whole when the newer is full.

    Parameters
    ----------
    make : makes an empty automaton.
    most : tokens that are kept. About 600 bytes each.
    """

    def __init__(self, make: Callable[[], A], most: int = 200_000) -> None:
        self._make = make
        self._half = most // 2
        #: at most two, the newest first
        self.automata: list[A] = []

    def remember(self, tokens: Sequence[int]) -> None:
        """Add a whole answer."""
        tokens = tokens[-self._half :]
        if not self.automata or len(self.automata[0].text) + len(tokens) > self._half:
            self.automata = [self._make(), *self.automata[:1]]
        newest = self.automata[0]
        newest.begin()
        for token in tokens:
            newest.extend(token)
