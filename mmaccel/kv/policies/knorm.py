"""KNorm: keep the keys of smallest norm."""

import torch
from torch import Tensor

from ...method import KeyBatch, Policy, register


@register
class KNorm(Policy):
    """Score keys by ``s_k = -||k||_2``: keys of small norm tend to receive much attention.

    *A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression*, EMNLP 2024, arXiv 2406.11430. The authors
    compress all but the first two layers; here all layers have the same budget.
    """

    name = "knorm"
    summary = "keys with the smallest norm; needs no attention"
    paper = "arXiv 2406.11430"
    default_retain = 0.25

    def score(self, keys: KeyBatch) -> Tensor:
        return -torch.linalg.vector_norm(keys.keys, dim=-1, dtype=torch.float32)
