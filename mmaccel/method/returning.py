"""Base of methods inside the language model whose dropped tokens may come back while decoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ..errors import UnsupportedError
from .base import Method, ModelFacts
from .layers import LayerMethod


class ReturningMethod(LayerMethod):
    """A method that chooses again among all visual tokens whenever new tokens follow a prompt.

    What it drops of a prompt waits at its layer, as a hidden state. Of every forward that follows, :meth:`recall` is shown what
    :meth:`observe` made of the attention of the layer before, by its last token. Of tokens that it chooses, those that wait run
    through the layers behind beside the new ones, at their own positions, and are stored there; stored ones that it does not
    choose are not read.
    """

    def conflict(self, other: Method) -> str | None:
        """Refuse methods that drop or pack tokens for good."""
        if other.site in ("layers", "cache", "codec") and not isinstance(other, ReturningMethod):
            return f"{self.name} brings dropped tokens back, which {other.name} would drop or pack while they come"
        return super().conflict(other)

    def check(self, family: ModelFacts) -> None:
        """Refuse models whose layers a token cannot run through later."""
        super().check(family)
        why = "has layers that keep a state, which takes tokens in their order" if family.stateful else family.no_return
        if why is not None:
            raise UnsupportedError(
                f"{self.name} lets tokens come back while it decodes, and the language model of {family.name} {why}; use "
                "'lazyllm-prefill', which drops the same ones for good."
            )

    @abstractmethod
    def recall(self, figures: Mapping[str, Tensor], among: Tensor, count: Tensor) -> Tensor:
        """``[B, n]`` bool, the visual tokens that the layers behind see in this forward.

        figures : what :meth:`observe` made of the attention, by place, ``[B, n]`` float32 each.
        among : ``[B, n]`` bool, the visual tokens that the layer before has seen.
        count : ``[B]`` long, how many of them are to be seen: as many as stayed of all pictures of the row.
        """
