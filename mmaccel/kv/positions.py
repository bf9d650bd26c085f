"""Next positions of the rows of a cache: they differ from the number of tokens that it has seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .index import select_rows

_BY_ROW = ("offset", "ahead", "axes_ahead")


@dataclass
class NextPositions:
    """Next positions of the rows of a cache.

    offset : ``[B]`` long: logical length minus next position. The next token of row b has the position
        ``get_seq_length() - offset[b]``; M-RoPE, left padding and renumbering are all in this one number.
    ahead : ``[B]`` long: with M-RoPE the last frames of a slow clip may have later positions than the question behind them.
        transformers goes on behind the question while it generates, and behind the frames, so much further, in the next
        turn and in a forward without positions. None once that has happened.
    axes_ahead : ``[B, axes]`` long: behind a prompt that ends in a picture every axis goes on from its own end while
        transformers generates, so much further than the first one; in the next turn all go on from the furthest. None where all
        axes are equal.
    """

    offset: Tensor | None = None
    ahead: Tensor | None = None
    axes_ahead: Tensor | None = None

    def next_turn(self) -> NextPositions:
        """NextPositions of another turn: in rows that end in a picture all axes go on from the furthest."""
        if self.axes_ahead is None or self.offset is None or self.ahead is None:
            return NextPositions(self.offset, self.ahead)
        ends = (self.axes_ahead != 0).any(1)
        offset = torch.where(ends, self.offset - self.ahead, self.offset)
        return NextPositions(offset, self.ahead.masked_fill(ends, 0))

    def rebase(self, fewer: int) -> None:
        """Keep all positions while the logical length gets ``fewer`` tokens shorter."""
        if self.offset is not None:
            self.offset = self.offset - fewer

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        select_rows(self, _BY_ROW, rows)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (x for name in _BY_ROW if (x := getattr(self, name)) is not None)
