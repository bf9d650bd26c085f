"""TOVA: keep the keys that the newest token attends to."""

import torch
from mmaccel_kernels.importance import importance
from torch import Tensor

from ...method import KeyBatch, Policy, register
from ..scoring.copies import of_first_keys


@register
class Tova(Policy):
    """Score keys by the attention paid by the last query, mean over all heads, so that all heads keep the same keys.

    *Transformers are Multi-State RNNs*, EMNLP 2024, arXiv 2401.06104. The paper evicts the key of lowest score at every
    step: ``every=1``. As in kvpress, the newest key always stays.
    """

    name = "tova"
    summary = "keys the newest token attends to, the same for all heads"
    paper = "arXiv 2401.06104"
    default_retain = 0.25
    shared = True
    window = 1

    def score(self, keys: KeyBatch) -> Tensor:
        heads = keys.keys.shape[1]
        paid = importance(keys.queries[:, :, -1:], keys.keys, scaling=keys.scaling, valid=keys.valid)
        paid = of_first_keys(paid, keys.keys, keys.valid).mean(1)
        paid[:, -1] = torch.inf
        return paid.masked_fill(~keys.valid, -torch.inf)[:, None].expand(-1, heads, -1)
