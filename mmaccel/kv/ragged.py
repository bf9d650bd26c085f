"""Keys and values of heads that store different counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class Ragged:
    """Keys and values of heads that store different counts, one after the other: ``[total, D]``, ``lengths [B, Hkv]``.

    ``longest`` is the width of :meth:`padded`, at least the longest head; it does not change when rows are selected, as the
    width of the index does not.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    longest: int

    def padded(self) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, longest, D]`` each; short heads end in zeros."""
        flat = self.lengths.flatten()
        place = torch.arange(self.longest, device=self.keys.device)
        there = place < self.lengths[..., None]
        at = (flat.cumsum(0) - flat).view_as(self.lengths)[..., None] + place
        # one row more than there is stands for what is padded
        at = at.masked_fill(~there, len(self.keys))
        keys, values = (pad(x, (0, 0, 0, 1))[at] for x in (self.keys, self.values))
        return keys, values

    def select(self, rows: Tensor) -> Ragged:
        """Keep, repeat or reorder rows of the batch."""
        flat = self.lengths.flatten()
        start = (torch.cumsum(flat, 0) - flat).view_as(self.lengths)[rows].flatten()
        lengths = self.lengths[rows]
        reps = lengths.flatten()
        at = torch.arange(int(reps.sum()), device=reps.device)
        at = at + torch.repeat_interleave(start - (torch.cumsum(reps, 0) - reps), reps)
        return Ragged(self.keys[at], self.values[at], lengths, self.longest)
