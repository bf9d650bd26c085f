"""Visual tokens that stay with a cache as they entered its prompts, to be shown again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .index import select_rows

_BY_ROW = ("places", "features", "dropped")


@dataclass
class VisualMemory:
    """The visual tokens of every row, in ``n`` slots.

    places : ``[B, n]`` int32, where they stand in the unreduced sequence; -1 is no token.
    features : ``[B, n, D]``, as they entered the prompt.
    dropped : ``[B, n]`` bool, those that no stage of the recipe has kept before or inside the language model.
    """

    places: Tensor
    features: Tensor
    dropped: Tensor

    def behind(self, earlier: VisualMemory | None) -> VisualMemory:
        """These behind those of ``earlier`` turns."""
        if earlier is None:
            return self
        device = self.features.device
        return VisualMemory(
            *(torch.cat([getattr(earlier, name).to(device), getattr(self, name)], dim=1) for name in _BY_ROW)
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (self.places, self.features, self.dropped)

    def copy(self) -> VisualMemory:
        """A copy to change independently. Tensors are not copied, since they are never changed in place."""
        return replace(self)

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; see :class:`.shared.Memory`."""
        select_rows(self, _BY_ROW, rows)

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on."""
        self.places = self.places.masked_fill(self.places >= seen, -1)

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Call place ``p`` from now on ``new[p]``; those that are not ``held [seen]`` bool are forgotten. The host waits."""
        at = self.places.long().clamp(min=0)
        stays = (self.places >= 0) & held.to(at.device)[at]
        self.places = new.to(self.places)[at].masked_fill(~stays, -1)
        some = stays.any(0)
        self.places, self.features, self.dropped = (getattr(self, name)[:, some] for name in _BY_ROW)
