"""Observers of a pass that stores nothing: one layer of a look ahead, or a text behind the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kv.packed import QuantisedLayer

#: the mask of a layer, ``[B, 1, q, q]`` bool, by its number and window; None for the model's own mask
Visible = Callable[[int, int | None], Tensor | None]


class LayerReached(Exception):
    """The layer of a look ahead was reached: the layers behind it need not run."""


class Preview:
    """Keeps queries ``[B, Hq, q, D]`` and keys ``[B, Hkv, q, D]`` of one layer, behind RoPE, and ends the pass there.

    visible : masks of the layers before, where the text model does not make them.
    below : lower layers whose values are kept, too, or None for no values. values : ``[B, Hkv, q, Dv]`` of these, and of the
        layer.
    """

    def __init__(self, layer: int, visible: Visible | None = None, below: Sequence[int] | None = None) -> None:
        self.layer, self.visible, self.below = layer, visible, below
        self.found: tuple[Tensor, Tensor, float] | None = None
        self.values: list[Tensor] = []

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Called by the attention function of every layer; raises :class:`LayerReached` at the one that is looked at."""
        if self.below is not None and (number == self.layer or number in self.below):
            self.values.append(value)
        if number == self.layer:
            self.found = query, key, scaling
            raise LayerReached
        shown = None if self.visible is None else self.visible(number, window)
        return None if shown is None else (key, value, shown)


class TextBehind:
    """A text behind a prompt, which attends to all that the layers of the cache store and to itself, and is not stored.

    layers, stored_from : of the cache; and the number there of a layer of the language model.
    places : ``[B, n]`` long, the places of the text; -1 for padding.
    found : by the number of the layer in the cache, queries ``[B, Hq, n, D]``, keys and values ``[B, Hkv, n, D]`` of the text,
        behind RoPE.
    """

    def __init__(self, layers: Sequence[QuantisedLayer], stored_from: Callable[[int], int], places: Tensor) -> None:
        self.layers, self.stored_from, self.places = layers, stored_from, places
        self.found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stored keys and values with those of the text ``[B, Hkv, K, D]``, and the mask ``[B, 1 or Hkv, n, K]``;
        ``window`` counts places back."""
        number = self.stored_from(number)
        self.found[number] = query, key, value
        layer, places = self.layers[number], self.places.to(query.device)
        stored, held = layer.index.by_head.to(query.device), layer.stored()
        own = places[:, None].expand(-1, stored.shape[1], -1)
        at, came = places[:, None, :, None], torch.cat([stored.long(), own], dim=2)[:, :, None]
        visible = (came >= 0) & (came <= at)
        if window is not None:
            visible &= at - came < window
        # padding sees anything, so that its output is a number
        return torch.cat([held[0], key], 2), torch.cat([held[1], value], 2), visible | (at < 0)
