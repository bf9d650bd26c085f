"""KeyDiff: keep the keys least similar to the mean key."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...method import KeyBatch, Policy, register


@register
class KeyDiff(Policy):
    """Score keys by ``s_k = -cos(k, mean of the normalised keys)``, in each head.

    *KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments*,
    arXiv 2504.15364.
    """

    name = "keydiff"
    summary = "keys least alike to the mean key; needs no attention"
    paper = "arXiv 2504.15364"
    default_retain = 0.25

    def score(self, keys: KeyBatch) -> Tensor:
        normed = normalize(keys.keys.float(), dim=-1).masked_fill(~keys.valid[:, None, :, None], 0.0)
        anchor = normed.sum(2, keepdim=True) / keys.valid.sum(1).clamp(min=1)[:, None, None, None]
        return -torch.cosine_similarity(normed, anchor, dim=-1)
