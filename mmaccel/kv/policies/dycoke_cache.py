"""DyCoke, in the cache: every decode step reads the visual keys it attends to most; the others stay stored."""

import torch
from torch import Tensor

from ...core.reduction import top_mask
from ...errors import MmaccelError
from ...method import KeyBatch, Policy, register


@register
class DyCokeCache(Policy):
    """The dynamic cache: all keys are stored, and each step reads some of them (a sparse read).

    *DyCoke: Dynamic Compression of Tokens for Fast Video Large Language Models*, CVPR 2025, arXiv 2411.15024.

    At every decode step the visual keys are ranked by the attention of layer ``layer - 1``, mean over heads; the layers from
    ``layer`` on read the best of them and all text. While that attention is similar (cosine over the visual keys) to that of
    the last step, the same keys are read. ``retain`` is the share that is read: memory is not freed, attention reads less.

    ``variant="official"``: where the attention is that similar all keys are read, since the program forgets its set at every
    step.

    Parameters
    ----------
    layer : 3 of 28, as in the paper; a number, or a share of the depth.
    alike : the cosine from which the keys of the last step are read again. 0.9 as in the program.

    The pruning before the language model that belongs to it is ``dycoke-ttm``; the recipe ``dycoke`` is both.
    """

    name = "dycoke-cache"
    summary = "every decode step reads the visual keys it attends to; dropped keys can come back"
    paper = "arXiv 2411.15024"
    default_retain = 0.2
    limits = {"layer": "[1, inf) or (0.0, 1.0]"}

    layer: float = 3 / 28
    alike: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduled or self.compact != "evict" or self.layer_budget != "uniform" or self.head_budget != "uniform":
            raise MmaccelError("dycoke-cache drops nothing for good; leave out budgets, compact, every and cap.")

    @property
    def steady(self) -> bool:  # type: ignore[override]
        """As many as the budget says, but for the authors' variant, which now and then reads all."""
        return not self.official

    def score(self, keys: KeyBatch) -> Tensor:
        return torch.zeros(keys.keys.shape[:3], device=keys.keys.device)

    def recall(
        self, paid: Tensor, before: Tensor | None, visual: Tensor, count: Tensor, chosen: Tensor | None
    ) -> Tensor:
        fresh = top_mask(paid, visual, count)
        if before is None or chosen is None:
            return fresh
        same = torch.cosine_similarity(paid * visual, before * visual, dim=1) >= self.alike
        return torch.where(same[:, None], visual if self.official else chosen, fresh)
