"""Base of methods that rank tokens by a first pass through lower layers of the language model."""

import dataclasses
from abc import abstractmethod
from typing import Any

from torch import Tensor

from ..core.budget import layer_at
from ..errors import MmaccelError
from .base import Method, ModelFacts
from .layers import LayerAttention
from .tokens import ProjectorMethod


class PreviewMethod(ProjectorMethod):
    """A method that observes the attention of layer ``layer`` in a first pass through the layers below it.

    The whole prompt runs through layers 0 to ``layer - 1`` without a cache, and layer ``layer`` computes queries and keys. What
    :meth:`observe` returns for them reaches :meth:`reduce` as ``tokens.signals``. Then the model reads what is left. Keys of
    earlier turns take no part in the first pass.

    ``layer`` is counted from 0; a float is a share of the depth, rounded half up. Where only some layers have attention it is
    the nearest of these, the lower of two.
    """

    unit = "picture"
    #: every token leaves for all heads at once
    mixes_heads = True
    limits = {"layer": "[0, inf) or [0.0, 1.0)"}
    layer: float
    #: lower layers whose values the attention shows together with those of ``layer``, see :attr:`LayerAttention.value`; None
    #: where it shows none
    below: tuple[float, ...] | None = None

    def fit(self, family: ModelFacts) -> Method:
        """A share of the depth becomes a layer."""
        layer = layer_at(self.layer, family.depth)
        if isinstance(self.layer, int) and layer >= family.depth > 0:
            raise MmaccelError(
                f"{self.name} cannot look at layer={layer}: this model has {family.depth} layers; give "
                f"layer={family.depth - 1} or less."
            )
        changes: dict[str, Any] = {"layer": nearest_attending(layer, family)}
        if self.below is not None:
            below = tuple(nearest_attending(layer_at(one, family.depth), family) for one in self.below)
            # of a shallow model some fall on one layer
            changes["below"] = tuple(sorted({one for one in below if one < changes["layer"]}))
        # methods are frozen dataclasses with a field `layer`
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @abstractmethod
    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """Named statistics per key, ``[B, K]`` float32 each."""


def nearest_attending(layer: int, family: ModelFacts) -> int:
    """The layer with attention that is nearest to ``layer``, the lower of two."""
    return min(family.attending, key=lambda one: abs(one - layer), default=layer)
