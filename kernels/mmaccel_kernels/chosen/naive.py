"""Attention over chosen keys in plain torch: the definition."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class ChosenKeys(NamedTuple):
    """The stored keys that a step reads, by their slots; -1 is no slot. Heads that choose the same have one entry.

    always : ``[B, 1 or Hkv, A]`` int32, read whatever is picked.
    units : ``[B, 1 or Hkv, P, unit]`` int32, the keys of every unit.
    picked : ``[B, 1 or Hkv, n]`` int32, the units that are read, of which there are ``counts [B, 1 or Hkv]`` int32.
    stored : all keys from this slot on are read too.
    whole : whether the host knows that no slot is -1, and that every head reads all units that are ``picked``.
    """

    always: Tensor
    units: Tensor
    picked: Tensor
    counts: Tensor
    stored: int
    whole: bool = False

    def slots(self, total: int, tail: Tensor | None = None) -> Tensor:
        """Slots that are read of ``total``, ``[B, 1 or Hkv, R]`` int32; of the first ``tail [1]``, if given."""
        heads = max(x.shape[1] for x in self[:4])
        parts = [self.always.expand(-1, heads, -1)]
        if total > self.stored:
            later = torch.arange(self.stored, total, dtype=torch.int32, device=self.always.device)
            later = later if tail is None else later.masked_fill(later >= tail, -1)
            parts.append(later.expand(len(self.always), heads, -1))
        picked, there = self.picked, None
        if not self.whole:
            there = torch.arange(picked.shape[2], device=picked.device) < self.counts[..., None]
            picked = picked.masked_fill(~there, 0)
        (keys,) = _rows_at(picked.expand(-1, heads, -1), self.units)
        if there is not None:
            keys = keys.masked_fill(~there[..., None], -1)
        return torch.cat([*parts, keys.flatten(2)], dim=2)

    def mask(self, total: int) -> Tensor:
        """The same as ``[B, 1 or Hkv, 1, total]`` bool."""
        slots = self.slots(total).long()
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
    slots, seen = chosen.slots(total, tail).expand(-1, hkv, -1), None
    if not chosen.whole or tail is not None:
        seen, slots = slots >= 0, slots.clamp(min=0)
    if visible is not None:
        shown = visible[:, :, 0].expand(-1, hkv, -1).gather(2, slots.long())
        seen = shown if seen is None else seen & shown
    k, v = _rows_at(slots, keys, values)
    rows = query.view(b, hkv, hq // hkv, -1)
    if seen is None and query.device.type == "cpu" and query.dtype == torch.float32 and k.shape == v.shape:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, scale=scaling)
        return out.reshape(b, hq, 1, -1), lse.reshape(b, hq, 1)
    v = v.float()
    logits = rows.float() @ k.float().mT * scaling
    if seen is not None:
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
        # whatever is there, times a weight of zero is nothing
        v = v.masked_fill(~seen[..., None], 0)
    lse = logits.logsumexp(-1, keepdim=True)
    p = (logits - (lse if seen is None else lse.masked_fill(lse == -torch.inf, 0))).exp()
    return (p @ v).to(query.dtype).view(b, hq, 1, -1), lse.view(b, hq, 1)


def _rows_at(at: Tensor, *of: Tensor) -> list[Tensor]:
    """``[B, 1 or H, n, D]`` each at ``at [B, H, m]`` int32: ``[B, H, m, D]``."""
    found, begin = [], None
    for x in of:
        (rows, heads, count, width), (row, head, step, one) = x.shape, x.stride()
        if x.device.type != "cpu" or one != 1 or step != width or row % width or head % width or not x.numel():
            places = at.long()[..., None].expand(-1, -1, -1, width)
            found.append(x.expand(-1, at.shape[1], -1, -1).gather(2, places))
            continue
        # rows of memory are copied faster than their entries are gathered
        key = rows, row // width, heads, head // width
        if begin is None or begin[0] != key:
            first = _begins(*key)
            begin = key, (at if first is None else at + first).flatten()
        last = (rows - 1) * key[1] + (heads - 1) * key[3] + count
        flat = x.as_strided((last, width), (width, 1)).index_select(0, begin[1])
        found.append(flat.view(*at.shape, width))
    return found


@lru_cache(maxsize=256)
def _begins(rows: int, row: int, heads: int, head: int) -> Tensor | None:
    """Where the slots of every head begin, ``[B, H, 1]`` int32; None where that is 0."""
    if rows == heads == 1:
        return None
    with torch.inference_mode(False):
        at = torch.arange(rows)[:, None] * row + torch.arange(heads) * head
        return at[..., None].int()
