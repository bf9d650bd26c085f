"""Keys and values of heads that store different counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class Ragged:
    """Keys and values of heads that store different counts, one after the other: ``[total, D]``, ``lengths [B, Hkv]``.

    ``bounds [B Hkv + 1]`` long say where each head begins, and where the last ends; made once, read at every step.
    ``longest`` is the width of :meth:`padded`, at least the longest head; it does not change when rows are selected, as the
    width of the index does not.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    longest: int
    bounds: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = pad(self.lengths.flatten().cumsum(0), (1, 0))

    def padded(self) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, longest, D]`` each; short heads end in zeros."""
        place = torch.arange(self.longest, device=self.keys.device)
        there = place < self.lengths[..., None]
        at = self.bounds[:-1].view_as(self.lengths)[..., None] + place
        # one row more than there is stands for what is padded
        at = at.masked_fill(~there, len(self.keys))
        keys, values = (pad(x, (0, 0, 0, 1))[at] for x in (self.keys, self.values))
        return keys, values

    def select(self, rows: Tensor) -> Ragged:
        """Keep, repeat or reorder rows of the batch."""
        start = self.bounds[:-1].view_as(self.lengths)[rows].flatten()
        lengths = self.lengths[rows]
        reps = lengths.flatten()
        at = torch.arange(int(reps.sum()), device=reps.device)
        at = at + torch.repeat_interleave(start - (torch.cumsum(reps, 0) - reps), reps)
        return Ragged(self.keys[at], self.values[at], lengths, self.longest)
