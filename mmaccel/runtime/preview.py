"""What is to be seen of a layer of the language model in a look ahead."""

from __future__ import annotations

from torch import Tensor


class Enough(Exception):
    """What was to be seen was seen: the layers need not go on."""


class Preview:
    """Notes queries ``[B, Hq, q, D]`` and keys ``[B, Hkv, q, D]`` of one layer, behind RoPE, and ends the pass there."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.found: tuple[Tensor, Tensor, float] | None = None

    def see(self, number: int, query: Tensor, key: Tensor, scaling: float | None) -> None:
        """Called by the attention function of every layer.

        Raises
        ------
        Enough
            At the layer that was asked for.
        """
        if number == self.layer:
            self.found = query, key, query.shape[-1] ** -0.5 if scaling is None else scaling
            raise Enough
