"""Observed attention: the mean attention a key received from the queries that could see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...method import KeyBatch
from ...method.registry import register
from .h2o import H2O


@register
@dataclass(frozen=True)
class ObservedAttention(H2O):
    """H2O without its favour for early keys: ``s_k = sum_q A[h, q, k] / #{q that see k}``.

    After ``ObservedAttentionPress`` of kvpress, https://github.com/NVIDIA/kvpress. While decoding, the number of queries
    that saw a key is how many tokens came at or after it.
    """

    name = "observed-attention"
    summary = "keys with the highest mean attention of the queries that see them"
    paper = "github.com/NVIDIA/kvpress"

    def score(self, keys: KeyBatch) -> Tensor:
        """``received [B, Hkv, K]`` by the queries at or after each key."""
        assert keys.received is not None
        newest = keys.index.amax(1, keepdim=True)
        return keys.received / (newest - keys.index + 1).clamp(min=1)[:, None]
