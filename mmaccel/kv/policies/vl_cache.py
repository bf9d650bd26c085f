"""VL-Cache: keep the keys that the text after the pictures attends to; layers get budgets by their sparsity."""

import torch
from torch import Tensor

from ...core.masks import suffix_sums
from ...method import KeyBatch, LayerAttention, Policy, register
from ..scoring.importance import behind_pictures, by_group, column_sums


@register
class VLCache(Policy):
    """Score keys by the attention paid by the post-vision queries.

    *VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language Model Inference Acceleration*, ICLR
    2025, arXiv 2410.23317.

    ``s_k = sum_q A[h, q, k]`` over the queries ``q`` after the last picture, summed over the query heads of a key head. The
    sparsity of a layer is the share of attention weights below 1 % of the largest in their row; a layer's budget is
    proportional to one minus its sparsity.

    Parameters
    ----------
    per_head : every key head chooses by itself; else all heads of a layer keep the same keys.

    ``variant="official"``: as a port of EffiVLM-Bench, since the authors' code is not public: a tenth of the budget is for the
    newest keys (text, which stays here anyway unless ``joint``), and the shares of layers are clipped and truncated.

    Its authors also report that with sparsity alone deep layers
    get too little, and distribute 80 % of the budget uniformly: ``layer_budget="sparsity:0.8"``.
    """

    name = "vl-cache"
    summary = "keys the text behind the pictures attends to, layers by sparsity"
    paper = "arXiv 2410.23317"
    default_retain = 0.1
    newest = 0.1

    layer_budget: str = "sparsity"
    per_head: bool = True

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        """``[B, Hkv, K]``: sums over the queries after the last picture."""
        weight = attention.once(_votes)
        return before + by_group(column_sums(attention, weight), before.shape[1], "sum")

    def score(self, keys: KeyBatch) -> Tensor:
        """``received [B, Hkv, K]``, or its sum over heads."""
        assert keys.received is not None
        score = keys.received
        if not self.per_head:
            score = score.sum(1, keepdim=True).expand_as(score)
        if self.official and keys.count is not None:
            newest = suffix_sums(keys.valid) <= (keys.count[:, None] * self.newest).long()
            score = score.masked_fill((newest & keys.valid)[:, None], torch.inf)
        return score


def _votes(attention: LayerAttention) -> Tensor:
    """``[B, q]`` float32: 1 for the queries after the last picture, else 0."""
    return behind_pictures(attention).float()
