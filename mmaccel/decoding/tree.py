"""Drafts that are trees: several tokens may follow one, and a model verifies all paths in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """Drafted tokens, and for each the number of the drafted token before it, which is smaller; -1 for the newest committed
    token."""

    tokens: list[int]
    parents: list[int]


def depths(parents: Sequence[int]) -> list[int]:
    """Number of tokens before each in its path; ``parents`` as in :class:`Tree`."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def ancestors(parents: Sequence[int]) -> Tensor:
    """``[n, n]`` bool: which tokens every token may see, those of its path and itself."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class StaticTree:
    """A tree whose shape never changes: a node is a path of ranks, among the likeliest tokens after the one before it.

    Parameters
    ----------
    paths : of all nodes below the root. A node needs the one before it.
    width : how many of the likeliest tokens after a token are known.
    """

    def __init__(self, paths: Sequence[tuple[int, ...]], width: int) -> None:
        #: by length, then by rank
        self.paths = sorted(paths, key=lambda path: (len(path), path))
        nodes = {path: node for node, path in enumerate(self.paths)}
        #: see :class:`Tree`
        self.parents = [nodes[path[:-1]] if len(path) > 1 else -1 for path in self.paths]
        self.width = width
        #: nodes that are followed by others, -1 for the root
        self.inner = frozenset(self.parents)
        place = {node: number for number, node in enumerate(dict.fromkeys(self.parents))}
        #: where the token of every node stands, in the lists of the likeliest tokens after every inner node
        self.index = [width * place[parent] + path[-1] for parent, path in zip(self.parents, self.paths, strict=True)]

    def fill(self, root: int, following: Callable[[int], Sequence[int]], most: int) -> Tree:
        """The first ``most`` nodes with tokens; ``following`` gives the likeliest tokens after one, as far as they are known.
        Nodes without a token are left out."""

        def padded(known: Sequence[int]) -> list[int | None]:
            return [*known[: self.width], *[None] * (self.width - len(known))]

        listed, tree, number = padded(following(root)), Tree([], []), {-1: -1}
        for node, (parent, index) in enumerate(zip(self.parents[:most], self.index[:most], strict=True)):
            token = listed[index]
            if token is not None:
                number[node] = len(tree.tokens)
                tree.tokens.append(token)
                tree.parents.append(number[parent])
            if node in self.inner:
                listed += padded(() if token is None else following(token))
        return tree
