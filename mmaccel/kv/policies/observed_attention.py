"""Observed attention: the mean attention a key received from the queries that could attend to it."""

from torch import Tensor

from ...method import KeyBatch, register
from .h2o import H2O


@register
class ObservedAttention(H2O):
    """H2O without its bias towards early keys: ``s_k = sum_q A[h, q, k] / #{q that may attend to k}``.

    After ``ObservedAttentionPress`` of kvpress, https://github.com/NVIDIA/kvpress. The number of queries that could attend to
    a key is the number of tokens from it to the newest one; padding between two turns is none.
    """

    name = "observed-attention"
    summary = "keys with the highest mean attention of the queries that see them"
    paper = "github.com/NVIDIA/kvpress"
    needs_ordinals = True

    def score(self, keys: KeyBatch) -> Tensor:
        """``received [B, Hkv, K]`` over the number of queries at or after each key."""
        number = keys.index if keys.ordinal is None else keys.ordinal
        newest = number.amax(1, keepdim=True)
        return super().score(keys) / (newest - number + 1).clamp(min=1)[:, None]
