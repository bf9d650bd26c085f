"""Tokens that the language model has dropped between its layers, and that may come back while it decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core import masks


@dataclass(frozen=True, eq=False)
class Parked:
    """Tokens at the input of a layer, ``K`` slots a row; those without a token come first or stand between others.

    places : ``[B, K]`` int32, where they stand in the unreduced sequence; -1 is no token.
    lengths : ``[B]`` long on the CPU, how many there are.
    planes : by name what goes with them into the layer, ``[B, K, ...]`` each.
    """

    places: Tensor
    lengths: Tensor
    planes: Mapping[str, Tensor]

    def joined(self, other: Parked) -> Parked:
        """These and others, where these are."""

        def both(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, y.to(x.device)], dim=1)

        planes = {name: both(x, other.planes[name]) for name, x in self.planes.items() if name in other.planes}
        return Parked(both(self.places, other.places), self.lengths + other.lengths, planes)

    def split(self, wanted: Tensor, lengths: Tensor) -> tuple[Parked, Parked]:
        """Split into the ``wanted [B, K]`` bool tokens, ``lengths [B]`` of them on the CPU, and the others; left-padded."""
        if not lengths.any():
            return self._those(wanted, lengths), self
        return self._those(wanted, lengths), self._those((self.places >= 0) & ~wanted, self.lengths - lengths)

    def _those(self, there: Tensor, lengths: Tensor) -> Parked:
        first = there.shape[1] - (int(lengths.max()) if len(lengths) else 0)
        order = masks.true_last(there)[:, first:]
        places = self.places.gather(1, order).masked_fill(~there.gather(1, order), -1)
        rows = torch.arange(len(order), device=order.device)[:, None]
        planes = {name: x[rows.to(x.device), order.to(x.device)] for name, x in self.planes.items()}
        return Parked(places, lengths, planes)

    def without(self, gone: Tensor) -> Parked:
        """Without those that are ``gone [B, K]`` bool; the host waits."""
        places = self.places.masked_fill(gone, -1)
        return replace(self, places=places, lengths=(places >= 0).sum(1).cpu())

    def select(self, rows: Tensor, on_host: Tensor) -> Parked:
        """Keep, repeat or reorder rows of the batch; ``on_host`` are the same on the CPU."""
        planes = {name: x[rows.to(x.device)] for name, x in self.planes.items()}
        return Parked(self.places[rows.to(self.places.device)], self.lengths[on_host], planes)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (self.places, self.lengths, *self.planes.values())


@dataclass(frozen=True, eq=False)
class Waiting:
    """Tokens that wait at the input of a layer, and the first ``n`` places that stayed with their prompts, ``stayed [B, n]``
    bool: as many visual tokens are seen in every forward."""

    aside: Parked
    stayed: Tensor


@dataclass
class ReactivationMemory:
    """State of a recipe with the cache whose dropped tokens may come back.

    visual : ``[B, n]`` bool, which of the first ``n`` places are visual tokens that entered the first layer that drops some.
    at : what waits at which layer of the language model.
    dropped : whether any layer has ever dropped a token, so that there is something to choose.
    """

    visual: Tensor
    at: dict[int, Waiting] = field(default_factory=dict)
    dropped: bool = False

    def note(self, visual: Tensor, since: int) -> None:
        """More places, from ``since`` on, ``visual [B, S]``."""
        self.visual = _extended(self.visual, visual, since)

    def add(self, layer: int, aside: Parked, stayed: Tensor, since: int) -> None:
        """Add the tokens that wait at a layer; of the places from ``since`` on those of ``stayed [B, S]`` bool stay."""
        before = self.at.get(layer)
        if before is not None:
            aside = before.aside.joined(aside)
        self.at[layer] = Waiting(aside, _extended(stayed[:, :0] if before is None else before.stayed, stayed, since))
        self.dropped |= aside.places.shape[1] > 0

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is carried."""
        yield self.visual
        for waiting in self.at.values():
            yield from (*waiting.aside.tensors(), waiting.stayed)

    def copy(self) -> ReactivationMemory:
        """A copy to change independently. Tensors are not copied, since they are never changed in place."""
        return replace(self, at=dict(self.at))

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; see :class:`.shared.Memory`."""
        self.visual = self.visual[rows.to(self.visual.device)]
        for layer, waiting in self.at.items():
            self.at[layer] = Waiting(
                waiting.aside.select(rows, on_host), waiting.stayed[rows.to(waiting.stayed.device)]
            )

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on."""
        if self.visual.shape[1] <= seen:
            return
        self.visual = self.visual[:, :seen]
        for layer, waiting in self.at.items():
            aside = waiting.aside.without(waiting.aside.places >= seen)
            self.at[layer] = Waiting(aside, waiting.stayed[:, :seen])

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Call place ``p`` from now on ``new[p]``; those that are not ``held [seen]`` bool are forgotten. Nothing that waits
        stands there, since the layers below store it."""
        held = held[: self.visual.shape[1]]
        self.visual = self.visual[:, held.to(self.visual.device)]
        for layer, waiting in self.at.items():
            aside = waiting.aside
            named = new.to(aside.places)[aside.places.long().clamp(min=0)]
            aside = replace(aside, places=torch.where(aside.places < 0, aside.places, named))
            self.at[layer] = Waiting(aside, waiting.stayed[:, held.to(waiting.stayed.device)])


def _extended(before: Tensor, more: Tensor, since: int) -> Tensor:
    """Marks ``before [B, n]`` of places, with ``more [B, S]`` of those from ``since`` on; between them nothing is marked."""
    before = before[:, :since]
    return torch.cat([pad(before, (0, since - before.shape[1])), more], dim=1)
