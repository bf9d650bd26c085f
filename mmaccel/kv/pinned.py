"""A cache whose tensors stay where they are while tokens are added: what captured decode steps read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .index import KeyIndex, to_device
from .room import put, shown

#: widths are multiples of it, so that prompts of different lengths are read by one captured step
ROUND = 64


class Layer(Protocol):
    """What is asked of a layer; see :class:`.layer.CompressedLayer`."""

    keys: Any
    values: Any
    seen: int

    @property
    def index(self) -> KeyIndex:
        """Where the stored keys came from."""


class Pinned:
    """The layers of a cache of which every head stores equally many keys, pinned for ``steps`` tokens to come at least.

    Where the next token is written and who sees it is known on the device; the host counts the tokens in ``added``.

    keys, values : of every layer, ``[B, Hkv, T, D]``.
    layers, offset : of the cache, see :class:`.shared.Shared`.
    group : of every layer, which of ``slots`` and ``masks`` are its own; layers that store equally many share them.
    slots : ``[1]`` long, where the next token is written. masks : ``[B or 1, 1 or Hkv, 1, T]`` bool, the slots that hold a key.
    positions : ``[B, 1]`` long, of the next token.
    """

    def __init__(self, layers: Sequence[Layer], offset: Tensor, steps: int) -> None:
        self.layers, self.added = layers, 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.group: list[int] = []
        self.slots: list[Tensor] = []
        self.masks: list[Tensor] = []
        found: dict[int | str, int] = {}
        longest = max(len(layer.index) for layer in layers)
        width = -(-(longest + steps) // ROUND) * ROUND
        self.steps = width - longest
        for layer in layers:
            index, device = layer.index, layer.keys.device
            name = id(index) if index.padded else f"{len(index)}"
            if name not in found:
                found[name] = len(self.masks)
                mask = torch.zeros(1, 1, 1, width, dtype=torch.bool, device=device)
                if index.padded:
                    mask = mask.repeat(*index.by_head.shape[:2], 1, 1)
                    mask[..., : len(index)] = index.by_head[:, :, None] >= 0
                else:
                    mask[..., : len(index)] = True
                self.masks.append(mask)
                self.slots.append(to_device(torch.tensor([len(index)]), device))
            self.group.append(found[name])
            self.keys.append(put(layer.keys, -2, width))
            self.values.append(put(layer.values, -2, width))
            # what was stored before is free at once
            layer.keys, layer.values = (shown(x[-1], -2, len(index)) for x in (self.keys, self.values))
        self.positions = (layers[0].seen - offset)[:, None].contiguous()

    @property
    def full(self) -> bool:
        """Whether there is room for no more."""
        return self.added == self.steps

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or writes, beside the model's and its own token."""
        return [*self.keys, *self.values, *self.slots, *self.masks, self.positions]

    def counted(self) -> None:
        """A step is over: the host counts its token."""
        self.added += 1
        for layer in self.layers:
            layer.seen += 1

    def release(self) -> None:
        """Give layers and indices what was added, as if they had been there at every step. What a step that was broken off has
        written is behind that, where nobody looks."""
        seen = self.layers[0].seen
        for number, layer in enumerate(self.layers):
            # layers that share an index extend it once
            places = torch.arange(seen - self.added, seen, device=layer.index.index.device)
            layer.index.extend(places.expand(len(layer.index.index), -1), False, seen)
            length = len(layer.index)
            layer.keys, layer.values = (shown(x[number], -2, length) for x in (self.keys, self.values))

    def begin(self) -> None:
        """A token comes: everybody sees it."""
        for slot, mask in zip(self.slots, self.masks, strict=True):
            mask.index_fill_(3, slot, True)

    def write(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``key [B, Hkv, 1, D]`` and ``value`` into layer ``number``; returns all it has, to be read under :meth:`mask`."""
        slot = self.slots[self.group[number]]
        keys, values = self.keys[number], self.values[number]
        keys.index_copy_(2, slot, key)
        values.index_copy_(2, slot, value)
        return keys, values

    def mask(self, number: int) -> Tensor:
        """The slots of layer ``number`` that hold a key."""
        return self.masks[self.group[number]]

    def positions_like(self, given: Tensor | None) -> Tensor:
        """The positions of the token, for every axis that is ``given [axes, B, 1]``."""
        return self.positions if given is None or given.dim() == 2 else self.positions.expand(len(given), -1, -1)

    def end(self) -> None:
        """The token has gone through all layers."""
        for slot in self.slots:
            slot.add_(1)
        self.positions.add_(1)

    def counters(self) -> list[Tensor]:
        """What every token moves on."""
        return [*self.slots, self.positions]

    def remember(self) -> Callable[[], None]:
        """What comes back takes out the tokens that have come since, of which there may be two: counters are what they are now,
        and so is what is stored in the next slot and in the one before it."""
        counters = [x.clone() for x in self.counters()]
        places = [torch.cat([slot - 1, slot]) for slot in self.slots]
        at = [places[group] for group in self.group]
        stored = [[x.index_select(2, i) for x, i in zip(held, at, strict=True)] for held in (self.keys, self.values)]

        def restore() -> None:
            for counter, x in zip(self.counters(), counters, strict=True):
                counter.copy_(x)
            for held, before in zip((self.keys, self.values), stored, strict=True):
                for x, i, old in zip(held, at, before, strict=True):
                    x.index_copy_(2, i, old)

        return restore
