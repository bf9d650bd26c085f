"""Attention over chosen keys in plain torch: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ChosenKeys(NamedTuple):
    """The stored keys that a step reads, by their slots; -1 is no slot. Heads that choose the same have one entry.

    always : ``[B, 1 or Hkv, A]`` int32, read whatever is picked.
    units : ``[B, 1 or Hkv, P, unit]`` int32, the keys of every unit.
    picked : ``[B, 1 or Hkv, n]`` int32, the units that are read, of which there are ``counts [B, 1 or Hkv]`` int32.
    stored : all keys from this slot on are read too.
    """

    always: Tensor
    units: Tensor
    picked: Tensor
    counts: Tensor
    stored: int

    def slots(self, total: int, tail: Tensor | None = None) -> Tensor:
        """Slots that are read of ``total``, ``[B, 1 or Hkv, R]`` long; of the first ``tail [1]``, if given."""
        heads = max(x.shape[1] for x in self[:4])
        later = torch.arange(self.stored, total, device=self.always.device)
        later = later if tail is None else later.masked_fill(later >= tail, -1)
        later = later.expand(len(self.always), heads, -1)
        there = torch.arange(self.picked.shape[2], device=later.device) < self.counts[..., None]
        at = self.picked.long().masked_fill(~there, 0).expand(-1, heads, -1)[..., None]
        units = self.units.expand(-1, heads, -1, -1)
        picked = units.gather(2, at.expand(-1, -1, -1, units.shape[3])).masked_fill(~there[..., None], -1)
        return torch.cat([self.always.long().expand(-1, heads, -1), later, picked.long().flatten(2)], dim=2)

    def mask(self, total: int) -> Tensor:
        """The same as ``[B, 1 or Hkv, 1, total]`` bool."""
        slots = self.slots(total)
        read = torch.zeros(*slots.shape[:2], total + 1, dtype=torch.bool, device=slots.device)
        return read.scatter_(2, slots.masked_fill(slots < 0, total), True)[:, :, None, :total]


def chosen_attention_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: ChosenKeys,
    scaling: float,
    visible: Tensor | None = None,
    tail: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`.chosen_attention`: gathered, and in float32."""
    (b, hq, _, _), (hkv, total) = query.shape, keys.shape[1:3]
    slots = chosen.slots(total, tail).expand(-1, hkv, -1)
    seen, slots = slots >= 0, slots.clamp(min=0)
    if visible is not None:
        seen = seen & visible[:, :, 0].expand(-1, hkv, -1).gather(2, slots)
    read = [x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3])).float() for x in (keys, values)]
    logits = query.float().view(b, hkv, hq // hkv, -1) @ read[0].mT * scaling
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    # whatever is there, times a weight of zero is nothing
    out = p @ read[1].masked_fill(~seen[..., None], 0)
    return out.to(query.dtype).view(b, hq, 1, -1), lse.view(b, hq, 1)
