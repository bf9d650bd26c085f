"""Base of methods by which tokens use fewer experts than the router of a layer chose."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core import transformers_api
from ..errors import UnsupportedError
from .base import Method, ModelFacts
from .layers import LayerAttention

#: rows of an attention map that are looked at together
_BLOCK = 512


class ExpertMethod(Method):
    """A method by which tokens skip experts in some layers of a language model that has experts.

    A router chooses some experts for every token and weighs them. Those that :meth:`uses` leaves out are not computed, and the
    weights of the others add up to what all added up to. Nothing is dropped and keys stay as they are, so it has no budget.
    Rows without pictures use all their experts, as do text-only calls.

    Examples
    --------
    >>> class OneExpert(ExpertMethod):
    ...     '''Use the best expert alone, in every layer.'''
    ...
    ...     name = "one-expert"
    ...
    ...     def layers(self, depth):
    ...         return range(depth)
    ...
    ...     def uses(self, weights, hidden, received, real):
    ...         return weights == weights.amax(-1, keepdim=True)
    """

    site = "layers"
    budget = "none"
    default_retain = None
    #: whether :meth:`uses` looks at the attention that tokens of a prompt receive
    ranks: bool = True

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason, if it ranks tokens of a prompt."""
        return "ranks the tokens of a whole prompt in every layer" if self.ranks else None

    def conflict(self, other: Method) -> str | None:
        """Refuse a second one."""
        if isinstance(other, ExpertMethod):
            return "both would leave out experts of the same layers"
        return super().conflict(other)

    def check(self, family: ModelFacts) -> None:
        """Refuse models without experts."""
        if family.depth and not any(family.experts_in(layer) is not None for layer in self.layers(family.depth)):
            raise UnsupportedError(
                f"{self.name} leaves out experts, and the layers of this {family.name} model that it works in have none; use "
                "it with a mixture of experts, such as Qwen3-VL-MoE."
            )

        if family.depth and not transformers_api.experts_skip_tokens():
            raise UnsupportedError(
                f"{self.name} needs transformers 5.23, whose experts skip tokens; update transformers."
            )

    @abstractmethod
    def layers(self, depth: int) -> Sequence[int]:
        """The layers in which tokens skip experts, of ``depth``, counted from 0."""

    def observe(self, attention: LayerAttention) -> Tensor:
        """The attention that each key of a layer receives from the queries that see it, ``[B, K]`` float32; mean over heads
        and these queries."""
        rows, keys = attention.query.shape[2], attention.key.shape[2]
        total = torch.zeros(len(attention.query), keys, device=attention.query.device)
        for start in range(0, rows, _BLOCK):
            paid = attention.attention(start, min(start + _BLOCK, rows)).nan_to_num(0.0)
            total += paid.mean(1).sum(1)
        if attention.visible is not None:
            seeing = attention.visible.float().mean(1).sum(1)
        else:
            seeing = rows - (torch.arange(keys, device=total.device) - (keys - rows)).clamp(min=0).float()
        return total / seeing.clamp(min=1)

    @abstractmethod
    def uses(self, weights: Tensor, hidden: Tensor, received: Tensor | None, real: Tensor) -> Tensor:
        """``[B, q, k]`` bool, the experts that each token uses.

        weights : ``[B, q, k]``, those of the experts that the router has chosen, in any order.
        hidden : ``[B, q, D]``, the input of the experts.
        received : ``[B, q]`` float32, what :meth:`observe` returned of the tokens of a prompt; None behind it.
        real : ``[B, q]`` bool, which tokens are no padding.
        """
