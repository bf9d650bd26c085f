"""A2SF: accumulated attention with a forgetting factor."""

from typing import Literal

import torch
from torch import Tensor

from ...core.masks import suffix_sums
from ...method import LayerAttention, register
from ..scoring.importance import by_group, column_sums
from .h2o import H2O


@register
class A2SF(H2O):
    """H2O in which the attention paid by a query counts less with every later query.

    *A2SF: Accumulative Attention Scoring with Forgetting Factor for Token Pruning in Transformer Decoder*, arXiv 2407.20485.

    ``s_k = sum_q forget^(Q - 1 - q) A[h, q, k]``: with ``forget`` near 0 only the newest query counts, with 1 it is H2O. While
    decoding ``s = forget s + A``.

    Parameters
    ----------
    forget : 0.95 as in the program; the paper tunes 0.1 to 0.9 per task.
    gqa : ``sum``, as the program accumulates per key head.
    recent : 16, as in the program.
    """

    name = "a2sf"
    summary = "keys with most attention, where older queries count less"
    paper = "arXiv 2407.20485"
    limits = {"forget": "(0, 1]"}

    forget: float = 0.95
    gqa: Literal["mean", "max", "sum"] = "sum"
    recent: float = 16

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        (weight, decay) = attention.once(self._weights)
        return before * decay + by_group(column_sums(attention, weight), before.shape[1], self.gqa)

    def _weights(self, attention: LayerAttention) -> tuple[Tensor, Tensor | float]:
        """``[B, q]`` float32, the weight of each query, and that of the sums before them, ``[B, 1, 1]``."""
        rows = attention.query.shape[2]
        if attention.visible is None:
            age = torch.arange(rows - 1, -1, -1, device=attention.query.device, dtype=torch.float32)
            return (self.forget**age).expand(len(attention.query), -1), self.forget**rows
        # padding, which sees nothing, is no query
        later = suffix_sums(attention.visible.any(-1).any(1))
        decay = (self.forget ** later[:, :1].double()).float()[..., None]
        return self.forget ** (later - 1).clamp(min=0).float(), decay
