"""Chunks of prompts as rows of a batch: cutting them, and joining neighbours. All tensors are on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .masks import true_last


@dataclass(frozen=True)
class Span:
    """The middle of a prompt, which is cut, and the largest size of a chunk."""

    begin: int
    end: int
    length: int

    @property
    def chunks(self) -> int:
        """Number of chunks; 1 for a prompt without a middle."""
        return max(1, -(-(self.end - self.begin) // self.length))


@dataclass(frozen=True)
class Chunks:
    """Chunks of prompts as rows of a batch. Each has the shared tokens, those before and behind the middle of its
    prompt, and a part of the middle between them.

    row : ``[R]`` long, the prompt of each chunk, rising.
    places : ``[R, q]`` long, where its tokens stand in the prompt, rising; -1 for padding, which is in front.
    shared : ``[R, q]`` bool, which of them all chunks of the prompt have.
    """

    row: Tensor
    places: Tensor
    shared: Tensor

    @staticmethod
    def cut(tokens: Sequence[Tensor], spans: Sequence[Span]) -> Chunks:
        """Cut the prompts, whose ``tokens [n]`` (long, ascending) are at these places, by ``spans``."""
        row, places, shared = [], [], []
        for number, (mine, span) in enumerate(zip(tokens, spans, strict=True)):
            before, middle, behind = mine[: span.begin], mine[span.begin : span.end], mine[span.end :]
            for part in middle.split(span.length) if len(middle) else (middle,):
                row.append(number)
                places.append(torch.cat([before, part, behind]))
                shared.append(torch.ones(len(places[-1]), dtype=torch.bool))
                shared[-1][len(before) : len(before) + len(part)] = False
        return Chunks(
            torch.tensor(row),
            pad_sequence(places, batch_first=True, padding_value=-1, padding_side="left"),
            pad_sequence(shared, batch_first=True, padding_value=False, padding_side="left"),
        )

    @property
    def padded(self) -> bool:
        """Whether any row has padding."""
        return bool((self.places < 0).any())

    @cached_property
    def number(self) -> Tensor:
        """Index of each chunk in its prompt, ``[R]`` long."""
        return torch.arange(len(self.row)) - torch.searchsorted(self.row, self.row)

    def tables(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The chunk of every place of prompts ``[B, S]`` that is in its part of the middle, and its slot there, both long; -1
        for all others."""
        chunk, slot = ((self.places >= 0) & ~self.shared).nonzero(as_tuple=True)
        at = self.row[chunk], self.places[chunk, slot]
        table = torch.full((2, *shape), -1)
        table[0][at], table[1][at] = chunk, slot
        return table[0], table[1]

    def pairs(self, joining: Tensor) -> Tensor:
        """``[R]`` long: into which chunk each goes, counted over all prompts, where in those that are ``joining [B]`` bool
        every second one joins the one before it."""
        number = torch.where(joining[self.row], self.number // 2, self.number)
        new: Tensor = torch.unique_consecutive(torch.stack([self.row, number]), dim=1, return_inverse=True)[1]
        return new

    def join(self, stays: Tensor, into: Tensor) -> tuple[Chunks, Join]:
        """The chunks after joining, with no other tokens than ``stays [R, q]`` bool, when they go ``into [R]`` (see
        :meth:`pairs`): the shared tokens once, then the left part of the middle, then the right one."""
        rows, (_, q), span = int(into[-1]) + 1, self.places.shape, int(self.places.max()) + 1
        chunk, slot = (stays & (self.places >= 0)).nonzero(as_tuple=True)
        right = torch.zeros(len(into), dtype=torch.bool)
        right[1:] = into[1:] == into[:-1]
        # of every place of the new rows the token that goes there, of the left chunk and of the right one
        source = torch.full((2, rows * span), -1)
        source[right[chunk].long(), into[chunk] * span + self.places[chunk, slot]] = chunk * q + slot
        taken, both = (source >= 0).any(0).view(rows, span), (source >= 0).all(0)
        order = true_last(taken)[:, -int(taken.sum(1).max()) :]
        held = taken.gather(1, order)
        at = torch.arange(rows)[:, None] * span + order
        first, second = (x[at] for x in torch.where(source[:1] >= 0, source, source.flip(0)))
        mean = (both[at] & held).flatten().nonzero()[:, 0]
        new = Chunks(self.row[~right], order.masked_fill(~held, -1), self.shared.flatten()[first] & held)
        left, filled = (~right).nonzero()[:, 0], first.masked_fill(~held, 0)
        return new, Join((len(into), q), left, filled, mean, second.flatten()[mean])


@dataclass(frozen=True)
class Join:
    """Mapping of ``R`` chunks of ``q`` slots to ``r`` chunks of ``w``; slots are numbered over all chunks.

    shape : ``R`` and ``q``.
    left : ``[r]`` long, the first chunk that goes into each.
    first : ``[r, w]`` long, the slot that each new slot is filled from; 0 for padding.
    mean, second : ``[m]`` long, new slots that are filled from two, and the other one.
    """

    shape: tuple[int, int]
    left: Tensor
    first: Tensor
    mean: Tensor
    second: Tensor

    def to(self, device: torch.device) -> Join:
        """The join on a device, copied without waiting."""
        parts = (x.to(device, non_blocking=True) for x in (self.left, self.first, self.mean, self.second))
        return Join(self.shape, *parts)

    def pick(self, x: Tensor) -> Tensor:
        """``[R or 1, q, ...] -> [r, w, ...]`` of what is the same in both chunks."""
        return x.expand(self.shape[0], *x.shape[1:]).flatten(0, 1)[self.first]

    def apply(self, x: Tensor) -> Tensor:
        """``[R, q, ...] -> [r, w, ...]``, with the mean of both where a token is in both chunks."""
        flat, new = x.flatten(0, 1), self.pick(x).flatten(0, 1)
        # two equal values are their mean to the bit
        mean = new[self.mean].lerp(flat[self.second], 0.5)
        return new.index_copy(0, self.mean, mean).unflatten(0, self.first.shape)
