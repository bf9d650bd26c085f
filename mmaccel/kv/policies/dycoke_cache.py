"""DyCoke, in the cache: every decode step reads the visual keys that matter to it; the others can come back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.reduction import top_mask
from ...errors import MmaccelError
from ...method import KeyBatch, Policy
from ...method.registry import register


@register
@dataclass(frozen=True)
class DyCokeCache(Policy):
    """The dynamic cache: nothing is dropped for good, each step reads less.

    *DyCoke: Dynamic Compression of Tokens for Fast Video Large Language Models*, CVPR 2025, arXiv 2411.15024.

    At every decode step the attention of layer ``layer - 1``, mean over heads, ranks the visual keys; the layers from there
    on read the best of them and all text. While that attention is alike (cosine over the visual keys) to that of the last
    step, the set stays as it was. ``retain`` is the share that is read: memory is not freed, attention reads less.

    Parameters
    ----------
    layer : 3 of 28, as in the paper; a number, or a share of the depth.
    alike : the cosine from which on the last set is read again. 0.9 as in the program.
    as_shipped : while the attention is alike, read everything: the program forgets its set at every step.

    The pruning before the language model that goes with it is the method ``dycoke``.
    """

    name = "dycoke-cache"
    summary = "every decode step reads the visual keys it attends to; dropped keys can come back"
    paper = "arXiv 2411.15024"
    default_retain = 0.2

    layer: float = 3 / 28
    alike: float = 0.9
    as_shipped: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer <= 0 or (isinstance(self.layer, float) and self.layer > 1):
            raise MmaccelError(
                f"dycoke-cache cannot choose at layer={self.layer}; give 1 or more, or a share up to 1.0."
            )
        if self.scheduled or self.compact != "evict" or self.layer_budget != "uniform" or self.head_budget != "uniform":
            raise MmaccelError("dycoke-cache drops nothing for good; leave out budgets, compact, every and cap.")

    def score(self, keys: KeyBatch) -> Tensor:
        """Everything stays."""
        return torch.zeros(keys.keys.shape[:3], device=keys.keys.device)

    def recall(
        self, paid: Tensor, before: Tensor | None, visual: Tensor, count: Tensor, chosen: Tensor | None
    ) -> Tensor:
        """``paid``, ``before``, ``visual``, ``chosen [B, n]``, ``count [B]`` -> ``[B, n]`` bool."""
        fresh = top_mask(paid, visual, count)
        if before is None or chosen is None:
            return fresh
        same = torch.cosine_similarity(paid * visual, before * visual, dim=1) >= self.alike
        return torch.where(same[:, None], visual if self.as_shipped else chosen, fresh)
