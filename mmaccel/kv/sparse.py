"""Recipes that read only some keys at every step; all of them stay stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .index import KeyIndex, leftmost


@dataclass
class SparseMemory:
    """What a recipe that reads only some keys at every step carries with the cache; all keys stay stored.

    count : ``[B]`` long, visual keys to be read of each row.
    paid : ``[B, n]`` float32, attention that the places up to the end of the last prompt received at the last step.
    chosen : ``[B, n]`` bool, the visual places that were read.
    """

    count: Tensor
    paid: Tensor | None = None
    chosen: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor that is carried."""
        return [x for x in (self.count, self.paid, self.chosen) if x is not None]

    def to(self, device: torch.device) -> SparseMemory:
        """The same on another device."""
        paid, chosen = (None if x is None else x.to(device) for x in (self.paid, self.chosen))
        return SparseMemory(self.count.to(device), paid, chosen)

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for name in ("count", "paid", "chosen"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[rows.to(tensor.device)])


class SparseRead:
    """The keys that layers from ``first`` on read in one step: those of ``places [B, n]`` bool, and of all later places."""

    def __init__(self, first: int, places: Tensor) -> None:
        self.first, self.places = first, places
        self._made: dict[int, tuple[KeyIndex, KeyIndex, Tensor]] = {}

    def _of(self, index: KeyIndex) -> tuple[KeyIndex, KeyIndex, Tensor]:
        """The index itself (so that it lives), that of what is read of it, and the slots of that, ``[B, 1 or Hkv, R]``."""
        if id(index) not in self._made:
            known = index.by_head
            at = known.long().clamp(0, self.places.shape[1] - 1)
            read = self.places.to(known.device)[:, None].expand(-1, known.shape[1], -1).gather(2, at)
            read = (read | (known >= self.places.shape[1])) & (known >= 0)
            order, there, lengths = leftmost(read)
            made = known.gather(2, order).masked_fill(~there, -1)
            made = made if index.index.dim() == 3 else made[:, 0]
            padded = bool((lengths < order.shape[-1]).any())
            self._made[id(index)] = index, KeyIndex(made, padded, index.upto, lengths), order
        return self._made[id(index)]

    def index(self, index: KeyIndex) -> KeyIndex:
        """Where the keys that are read came from."""
        return self._of(index)[1]

    def read(self, index: KeyIndex, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, K, D]`` each -> ``[B, Hkv, R, D]``."""
        at = self._of(index)[2].expand(-1, keys.shape[1], -1)[..., None]
        return keys.gather(2, at.expand(-1, -1, -1, keys.shape[-1])), values.gather(
            2, at.expand(-1, -1, -1, values.shape[-1])
        )
