"""Forward metadata for the cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .index import KeyIndex
from .key_bias import Earlier
from .merged_keys import MergedKeys
from .sparse import SparseRead


@dataclass
class Phase:
    """The tokens of a forward that the layers between two reductions see.

    places : ``[B, q]`` int32, the place of each token in the unreduced sequence; -1 for padding.
    padded : whether any is padding.
    chosen : ``[B, q]`` long on the CPU, the same as places of this forward; None where every token stays and none is padding.
    bidirectional_groups : ``[B, seen]`` long, the group of every place seen so far, whose places attend to each other both
        ways; -1 for causal places. None where all are causal.
    back : ``[B]`` long on the CPU, how many tokens of the prompt come back in front of the new ones; None where none does.
    """

    places: Tensor
    padded: bool
    chosen: Tensor | None = None
    bidirectional_groups: Tensor | None = None
    back: Tensor | None = None
    _indices: dict[torch.device, KeyIndex] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of every row that are no padding, ``[B]`` long on the CPU."""
        if self.padded and self.chosen is not None:
            own = (self.chosen >= 0).sum(1)
        else:
            width = self.places.shape[1] - (0 if self.back is None else int(self.back.max()))
            own = torch.full((len(self.places),), width)
        return own if self.back is None else own + self.back

    def behind(self, places: Tensor, back: Tensor) -> Phase:
        """The same with tokens of the prompt in front: ``places [B, r]``, of which ``back [B]`` on the CPU are tokens."""
        padded = self.padded or bool((back < places.shape[1]).any())
        both = torch.cat([places, self.places.to(places.device)], dim=1)
        return replace(self, places=both, padded=padded, back=back, _indices={})

    def shared_index(self, upto: int, device: torch.device) -> KeyIndex:
        """One index of these places for all layers on ``device`` that store them first."""
        if device not in self._indices:
            lengths = self.lengths[:, None]
            self._indices[device] = KeyIndex(self.places.to(device), self.padded, upto, lengths)
        return self._indices[device]


@dataclass
class ForwardInfo:
    """Tokens on their way into a cache.

    seen : tokens the cache has seen before. length : tokens of this forward before any reduction.
    as_stored : whether layers may be read as they are stored: nothing but attention looks at their keys in this forward.
    phases : which tokens are left from which layer on, the first from layer 0.
    reads : what layers read in this forward from which one on, if not everything, rising.
    where_parked : layers in host memory that are read there, since this forward reads few of their keys.
    by_heads : whether nothing but attention looks at keys, so that layers in host memory may be read some heads at a time.
    weights, first_weights : what is added to the logits of keys, see :class:`.places.Places`.
    merged : the keys that others were merged into, whose number is added to their logits, too; None where there are none.
    by_distance : whether a factor of distance is added, too (:mod:`.distance`).
    rotations : cosines and sines ``[1 or B, q, D]`` of the tokens that enter the layers, and a function that returns those of
        tokens before them, where codecs need them (:mod:`.key_bias`).
    expected_new_tokens : how many tokens may follow these at most, where that is known; no room is made for more.
    following : how many of them come for certain, with nothing evicted before; room for all is made at once.
    """

    seen: int
    length: int
    as_stored: bool
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    reads: list[tuple[int, SparseRead | None]] = field(default_factory=list)
    where_parked: Collection[int] = ()
    by_heads: bool = False
    weights: Tensor | None = None
    first_weights: Tensor | None = None
    merged: MergedKeys | None = None
    by_distance: bool = False
    expected_new_tokens: int | None = None
    following: int = 0
    rotations: tuple[Tensor, Tensor, Earlier] | None = None

    def phase(self, layer: int) -> Phase:
        """The phase a layer belongs to."""
        if len(self.phases) == 1:
            # every decode step
            return self.phases[0][1]
        return next(phase for first, phase in reversed(self.phases) if first <= layer)

    def sparse(self, layer: int) -> SparseRead | None:
        """Sparse read of a layer in this forward; None for everything."""
        if not self.reads:
            # nearly every forward
            return None
        return next((read for first, read in reversed(self.reads) if first <= layer), None)
