"""The error that the output of attention has without a key."""

import torch
from torch import Tensor

from ...method import KeyBatch


def eviction_error(scores: Tensor, keys: KeyBatch, exact: bool = True) -> Tensor:
    """``[B, Hkv, K]`` float32: what the output of attention loses with each key, if the scores are its weights.

    *CAOTE: KV Cache Selection for LLMs via Attention Output Error-Based Token Eviction*, arXiv 2504.14051. Without key ``j``
    the other weights grow by ``1 / (1 - a_j)``, so the output ``o = sum a v`` changes by ``a_j / (1 - a_j) (o - v_j)``; the
    score is the length of that. The weights ``a`` are the scores over their sum (less the lowest, where that is negative).

    scores : ``[B, Hkv, K]``; infinite ones stay as they are and take no part. exact : whether ``o`` is that sum, or the mean of
        the values.
    """
    finite = scores.isfinite() & keys.valid[:, None]
    least = scores.masked_fill(~finite, torch.inf).amin(-1, keepdim=True).clamp(max=0.0).nan_to_num(0.0, 0.0, 0.0)
    weight = (scores.float() - least).masked_fill(~finite, 0.0)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    values = keys.values.float()
    mean = weight if exact else finite / finite.sum(-1, keepdim=True).clamp(min=1)
    output = (mean[:, :, None] @ values.masked_fill(~finite[..., None], 0.0)).float()
    distance = torch.linalg.vector_norm(values - output, dim=-1)
    return torch.where(finite, weight / (1 - weight).clamp(min=1e-6) * distance, scores)
