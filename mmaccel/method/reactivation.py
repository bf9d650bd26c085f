"""Base of methods inside the language model that may read dropped tokens again while decoding."""

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ..errors import UnsupportedError
from .base import Method, ModelFacts
from .layers import LayerMethod


class ReactivatingMethod(LayerMethod):
    """A method that chooses anew among all visual tokens whenever new tokens follow a prompt.

    What it drops of a prompt is stored at its layer as a hidden state. In every later forward, :meth:`recall` gets what
    :meth:`observe` returned for the attention of the layer before, by its last token. Chosen tokens that are stored run through
    the layers behind beside the new ones, at their own positions, and their keys are kept; keys that it does not choose are
    not read.
    """

    def conflict(self, other: Method) -> str | None:
        """Refuse methods that drop or pack tokens for good."""
        if other.site in ("layers", "cache", "codec") and not isinstance(other, ReactivatingMethod):
            return (
                f"{self.name} brings dropped tokens back, which {other.name} would drop, pack or change while they come"
            )
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
    def recall(self, figures: Mapping[str, Tensor], candidates: Tensor, count: Tensor) -> Tensor:
        """``[B, n]`` bool, the visual tokens that the layers behind see in this forward.

        figures : what :meth:`observe` returned for the attention, by place, ``[B, n]`` float32 each.
        candidates : ``[B, n]`` bool, the visual tokens that the layer before has seen.
        count : ``[B]`` long, how many of them to choose: as many as stayed of all pictures of the row.
        """
