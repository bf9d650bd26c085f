"""Token Recycling: draft the tokens that were likeliest after the newest one when the model read it last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .automaton import Store
from .base import Drafter
from .tree import StaticTree, Tree

#: how many of the likeliest tokens after a token are kept
WIDTH = 8
#: the authors' tree "2.2.2" as paths of ranks
_PATHS = """
0 1 2 3 4 5 6 7
00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70
000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500
0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000
00000 00001 00002 00010 00020 00100 01000 10000
000000 000001 000100
"""
TREE = StaticTree([tuple(map(int, path)) for path in _PATHS.split()], WIDTH)


class Successors(Store):
    """The likeliest tokens after every token, as the model said when it read that token last."""

    def __init__(self) -> None:
        self.following: dict[int, Sequence[int]] = {}

    def after(self, token: int) -> Sequence[int]:
        """The likeliest first; empty for a token that was never read."""
        return self.following.get(token, ())


@dataclass(eq=False)
class TokenRecycling(Drafter):
    """Draft what was likeliest after the newest token when the model read it last, and after that token, and so on.

    *Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling*, arXiv 2408.08696.

    After every forward the 8 likeliest tokens behind each token that it read are kept, also those behind rejected drafts. A
    draft is the chain of the likeliest tokens, or the authors' tree of 80 tokens and at most 6 in a path.

    Parameters
    ----------
    earlier : what earlier calls have kept, :meth:`store`.

    Paper and program: their table begins with zeros, here nothing is drafted behind a token that was never read.
    """

    name = "tokenrecycling"
    nodes = len(TREE.paths)
    longest = len(TREE.paths[-1])
    successors = WIDTH

    earlier: Successors | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept = Successors() if self.earlier is None else self.earlier

    @classmethod
    def store(cls) -> Successors:
        return Successors()

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        chain: list[int] = []
        while len(chain) < most and (following := self._kept.after(chain[-1] if chain else tokens[-1])):
            chain.append(following[0])
        return chain

    def tree(self, tokens: Sequence[int], most: int) -> Tree:
        return TREE.fill(tokens[-1], self._kept.after, most)

    def learn(self, tokens: Sequence[int], following: Sequence[Sequence[int]]) -> None:
        self._kept.following.update(zip(tokens, following, strict=True))
