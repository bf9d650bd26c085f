"""Elastic Cache: other keys are merged into important ones; while decoding, keys are evicted at a fixed distance."""

import torch
from torch import Tensor

from ...core.masks import resorted
from ...errors import MmaccelError
from ...method import KeyBatch, LayerAttention, Policy, register
from ..scoring.importance import column_sums


@register
class ElasticCache(Policy):
    """Merging by importance at the end of the prompt, a distance rule while decoding; all heads keep the same keys.

    *Efficient Inference of Vision Instruction-Following Models with Elastic Cache*, ECCV 2024, arXiv 2407.18121.

    At the end of the prompt ``s_k = sum_q mean_h A[h, q, k]``; the best keys are anchors, and every other key is merged
    into the anchor nearest to it in the sequence, keys and values by their mean. While decoding (``growth`` is
    the share of new tokens by which the cache grows) the key ``distance`` slots from the end is evicted, whatever its score,
    so that both the beginning and the newest keys stay; as soon as there is one too many with ``every=1``, as in the paper,
    and with ``every=16``, as in the recipe ``elastic-cache-decode``, eight neighbours around that slot at a time.

    ``variant="official"``: the scores are sorted, and the *places* in the sorted list, instead of ranks, are compared with the
    number to drop, so that the anchors are not the best keys.

    Parameters
    ----------
    distance : from the end of the cache if negative, else from its beginning. -25 as in the authors' scripts.

    Paper and program: the program evicts text and visual keys alike (``joint=True``) and keeps the first and the last key
    (``sinks=1, recent=1``).
    """

    name = "elastic-cache"
    summary = "keys with most attention take up their neighbours; decoding drops at a fixed distance"
    paper = "arXiv 2407.18121"
    default_retain = 0.25
    shared = True
    # the distance rule needs no scores
    observes_steps = False

    compact: str = "nearest"
    distance: int = -25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distance == 0:
            raise MmaccelError(
                "distance=0 names no key; give slots from the beginning, or as a negative number the end."
            )

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        """``[B, Hkv, K]``: sums over queries, mean over all heads."""
        return before + column_sums(attention).mean(1, keepdim=True)

    def score(self, keys: KeyBatch) -> Tensor:
        """``received [B, Hkv, K]``; while decoding the distance from the slot to be evicted."""
        assert keys.received is not None
        if keys.decoding:
            slot = keys.valid.cumsum(1) - 1
            held = keys.valid.sum(1, keepdim=True)
            leaves = self.distance if self.distance > 0 else held - 1 + self.distance
            score = (slot - leaves).abs().float()
        elif self.official:
            score = self.as_shipped(keys)
        else:
            return keys.received
        return score[:, None].expand(-1, keys.keys.shape[1], -1)

    def as_shipped(self, keys: KeyBatch) -> Tensor:
        """``[B, K]``: scores under which the program's choice among the competing keys is the best.

        It takes entry ``i`` of the sorted list, which is the place of the ``i``-th lowest score, for the score of key ``i``.
        """
        assert keys.received is not None
        candidates = keys.valid if self.joint else keys.valid & keys.visual
        # competing keys first, in the order of their scores
        order = keys.received[:, 0].masked_fill(~candidates, torch.inf).argsort(dim=1, stable=True)
        order = resorted(order, (~candidates).long())
        number = (candidates.cumsum(1) - 1).clamp(min=0)
        score = number.gather(1, order).gather(1, number).float()
        return score.masked_fill(~candidates, -torch.inf)
