"""Base of methods whose lower layers read a prompt in chunks that join between layers."""

import dataclasses
from abc import abstractmethod

from torch import Tensor

from ..core.budget import layer_at
from ..errors import UnsupportedError
from .base import Method, ModelFacts
from .layers import LayerAttention
from .tokens import TokenMethod


class ChunkMethod(TokenMethod):
    """A method that drops visual tokens of a prompt's chunks before neighbouring chunks join.

    The prompt from its first to its last visual token is cut into chunks of equal length. Each goes through the lower layers
    with a copy of all text before and behind, at positions as if nothing else were between the two, so that positions of chunks
    overlap; where positions have several axes, time begins anew, and rows and columns go on. At the input of some layers every
    second chunk joins the one before it: copies of text become their mean, and so do their keys and values in all layers
    below. Before it joins, a chunk drops the visual tokens that :meth:`reduce` leaves out, with their keys and values. When all
    have joined, the layers above read what is left as one prompt.

    ``tokens.signals`` has what :meth:`observe` returned for the tokens that a chunk has of each picture, whose budget is ``n``.
    Of two chunks that join the right one keeps ``n / 2``, rounded down, and the left one the rest, or more where the
    other has fewer.

    The number of chunks is the tokens divided by ``n``, rounded up to a power of two, and doubled until no chunk has more than
    ``length`` tokens or, for a prompt beyond the model's positions, is longer than half of these; there are fewer where layers
    are not enough. A chunk without a neighbour waits for the next level.

    Layers below ``layer``, counted from 0, read the chunks as they were cut. The others are shared out equally over the levels
    of the tree, the rest to the lowest; a float is a share of the depth, rounded half up and moved to where two levels have a
    layer. Layers that add DeepStack features are below all joins.
    """

    site = "layers"

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: it cuts prompts itself."""
        return "cuts the prompt into chunks of its own, which do not see each other"

    excludes = dict.fromkeys(
        ("layers", "cache", "codec"),
        "one joins what layers have stored of chunks, and the other needs a prompt in one piece there",
    )
    weighable = False
    #: every token leaves for all heads at once
    mixes_heads = True
    unit = "picture"
    limits = {"layer": "[0, inf) or [0.0, 1.0)", "length": "[0, inf)"}
    layer: float
    length: int

    def fit(self, family: ModelFacts) -> Method:
        """A share of the depth becomes a layer."""
        reach = self._reach(family)
        if isinstance(self.layer, int) or not reach:
            return self
        layer = min(max(layer_at(self.layer, family.depth), reach[0]), reach[-1])
        # methods are frozen dataclasses with a field `layer`
        return dataclasses.replace(self, layer=layer)  # type: ignore[type-var]

    @staticmethod
    def _reach(family: ModelFacts) -> range:
        """Valid values of ``layer``: the first join is above it, and at least one layer is above the last join."""
        return range(max(0, family.deepstack - 1), family.depth - 1)

    def check(self, family: ModelFacts) -> None:
        """Refuse language models whose layers cannot read a prompt in parts, and layers out of reach."""
        if family.undivided is not None:
            raise UnsupportedError(
                f"{self.name} has layers read a prompt in chunks, and the language model of {family.name} "
                f"{family.undivided}; use 'fastv' or another method that leaves the prompt in one piece."
            )
        reach = self._reach(family)
        if not family.depth:
            # a family as such, of no model
            return
        if not reach:
            raise UnsupportedError(
                f"{self.name} joins chunks above the layers that add DeepStack features, and this {family.name} model adds "
                "some before its last layer; use 'divprune' or another method before the language model."
            )
        if self.layer not in reach:
            raise UnsupportedError(
                f"layer={self.layer} is out of reach: in this {family.name} model of {family.depth} layers {self.name} takes "
                f"{reach[0]} to {reach[-1]}; give layer={min(reach, key=lambda one: abs(one - self.layer))}."
            )

    def highest(self, depth: int) -> int:
        """The largest number of levels that can join in a model of ``depth`` layers."""
        return depth - 1 - int(self.layer)

    def joins(self, levels: int, depth: int) -> list[int]:
        """The layers at whose input chunks join, ascending, of a tree with ``levels`` levels in a model of ``depth``
        layers."""
        each = (depth - int(self.layer)) // (levels + 1)
        return [depth - each * left for left in range(levels, 0, -1)]

    @abstractmethod
    def observe(self, attention: LayerAttention, positions: Tensor, layer: int) -> dict[str, Tensor]:
        """Named figures per token of every chunk, ``[R, q]`` float32 each.

        Parameters
        ----------
        attention : of the last layer before a join, whose rows are chunks; keys of earlier turns are in front of theirs.
        positions : ``[R, q]``, where the tokens stand, on the first axis where there are several.
        layer : which of the model it is.
        """
