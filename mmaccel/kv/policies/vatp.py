"""VATP: attention times the norm of the value."""

import torch
from torch import Tensor

from ...method import KeyBatch, register
from .h2o import H2O


@register
class VATP(H2O):
    """Score keys by the attention received times the L1 norm of their value.

    *Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction: Value Also Matters*, EMNLP
    2024, arXiv 2406.12335.

    ``s_k = ||v_k||_1 sum_q A[h, q, k]``. The first keys receive much attention but have small values, so they are kept
    explicitly.

    Parameters
    ----------
    sinks : 20, as in the authors' commands.

    The authors' program masks keys instead of freeing them.
    """

    name = "vatp"
    summary = "keys with most attention, weighed by the norm of their values"
    paper = "arXiv 2406.12335"

    sinks: int = 20

    def score(self, keys: KeyBatch) -> Tensor:
        return super().score(keys) * torch.linalg.vector_norm(keys.values, 1, dim=-1, dtype=torch.float32)
