"""Keys and values of heads that store different counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .growable import trimmed


@dataclass
class Ragged:
    """Keys and values of heads that store different counts, one after the other: ``[total, D]``, ``lengths [B, Hkv]``.

    ``bounds [B Hkv + 1]`` long say where each head begins, and where the last ends; made once where none are given, read at
    every step.
    ``longest`` is the width of :meth:`padded`, at least the longest head; it does not change when rows are selected, as the
    width of the index does not.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    longest: int
    bounds: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.bounds is None:
            self.bounds = pad(self.lengths.flatten().cumsum(0), (1, 0))

    def padded(self) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, longest, D]`` each; short heads end in zeros."""
        shape = *self.lengths.shape, self.longest
        if not len(self.keys):
            return self.keys.new_zeros(*shape, self.keys.shape[1]), self.values.new_zeros(*shape, self.values.shape[1])
        at = self.bounds[:-1, None] + torch.arange(self.longest, device=self.keys.device)
        gone = (at >= self.bounds[1:, None])[..., None]
        # whole rows are copied faster than entries are gathered
        at = at.clamp_(max=len(self.keys) - 1).flatten()
        keys, values = (
            x.index_select(0, at).view(*gone.shape[:2], -1).masked_fill_(gone, 0.0).view(*shape, x.shape[1])
            for x in (self.keys, self.values)
        )
        return keys, values

    def to(self, dtype: torch.dtype) -> Ragged:
        """The same in another precision."""
        return Ragged(self.keys.to(dtype), self.values.to(dtype), self.lengths, self.longest)

    def moved(self, move: Callable[[Tensor, int], Tensor]) -> Ragged:
        """The same with keys and values replaced by what ``move(x, dim)`` returns, which shows the same."""
        made = copy.copy(self)
        made.keys, made.values = move(self.keys, 0), move(self.values, 0)
        return made

    def trim(self) -> None:
        """Give back the room behind what is stored."""
        self.keys, self.values = trimmed(self.keys), trimmed(self.values)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor held."""
        return self.keys, self.values, self.lengths, self.bounds

    def select(self, rows: Tensor) -> Ragged:
        """Keep, repeat or reorder rows of the batch."""
        start = self.bounds[:-1].view_as(self.lengths)[rows].flatten()
        lengths = self.lengths[rows]
        reps = lengths.flatten()
        at = torch.arange(int(reps.sum()), device=reps.device)
        at = at + torch.repeat_interleave(start - (torch.cumsum(reps, 0) - reps), reps)
        return Ragged(self.keys[at], self.values[at], lengths, self.longest)
