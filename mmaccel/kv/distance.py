"""RESTORE's factor of distance: attention to far tokens is raised to what it was before tokens between them were dropped."""

import torch
from torch import Tensor

#: frequencies of the factor and their base, whatever the model's
_FREQUENCIES, _BASE = 64, 10000.0


def distance_factor(queries: Tensor, keys: Tensor, end: int) -> Tensor:
    """``[B, H, q, K]`` float32, added to attention logits: ``log(2 - f(p_i - p_j))`` of queries and keys at their places.

    ``f(x)`` is the mean of ``cos(x / 10000^(t / 64))`` over ``t = 0 .. 63``, so the factor is 0 at no distance.

    queries : ``[B, q]`` whole numbers. keys : ``[B, H, K]``; what is added for padding (-1) does not matter.
    end : one more than the largest of these.
    """
    keys = keys.to(queries.device).long().clamp(min=0)
    queries = queries.long().clamp(min=0)
    frequency = _BASE ** -(torch.arange(_FREQUENCIES, device=queries.device) / _FREQUENCIES)
    steps = torch.arange(end, device=queries.device)[:, None] * frequency
    factor = (2 - steps.cos().mean(1)).log()
    return factor[(queries[:, None, :, None] - keys[:, :, None]).abs()]
