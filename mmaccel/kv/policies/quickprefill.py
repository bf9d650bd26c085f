"""QuickPrefill: keep the tokens whose keys of all heads have the smallest norm together."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...method import KeyBatch, LayerAttention, Policy, register
from ..scoring.importance import behind_pictures, column_sums

Mode = Literal[
    "key_norms_small",
    "key_norms",
    "vector_norms",
    "vector_norms_small",
    "key_weighted_vector_norms",
    "attention_weights",
    "attention_weights_sum",
    "query_attention_weights",
    "query_attention_weights_by_value_norm",
]


@register
class QuickPrefill(Policy):
    """Keep the same tokens in all heads of a layer: by default those of smallest ``||k||``, ``k`` the keys of all heads joined.

    *QuickVideo: Real-Time Long Video Understanding with System Algorithm Co-Design*, arXiv 2505.16175. The authors prefill a
    video group by group, and keep ``top_k`` tokens of each group. Here the prompt is read in one piece, or in the pieces of
    ``chunk``; then the tokens of all pieces compete for the budget of the whole prompt after each.

    Parameters
    ----------
    mode : the score, by the authors' names; ``v`` are the values of all heads joined. ``key_norms_small``: ``-||k||``, their
        default; ``key_norms``: ``||k||``; ``vector_norms``, ``vector_norms_small``: ``||v||`` and ``-||v||``;
        ``key_weighted_vector_norms``: ``||v||`` times the softmax of ``||k||`` over the tokens; ``attention_weights``: the mean
        attention, over heads and the queries from the token on; ``attention_weights_sum``: its sum over queries;
        ``query_attention_weights``: the sum over the queries behind the last picture;
        ``query_attention_weights_by_value_norm``: that times ``||v||``.

    The program's layer-wise decay of ``top_k`` is ``layer_budget`` here, as in ``pyramid:20``.
    """

    name = "quickprefill"
    summary = "tokens with the smallest norm of the keys of all heads; needs no attention"
    paper = "arXiv 2505.16175"
    default_retain = 0.5
    shared = True
    needs_ordinals = True

    mode: Mode = "key_norms_small"

    @property
    def observes(self) -> bool:
        """Whether the mode looks at attention."""
        return "attention" in self.mode

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        """``[B, Hkv, K]``: sums over the queries, or over those behind the last picture; means over all heads."""
        weight = attention.once(_votes) if self.mode.startswith("query") else None
        return before + column_sums(attention, weight).mean(1, keepdim=True)

    def score(self, keys: KeyBatch) -> Tensor:
        key, value = (torch.linalg.vector_norm(x, dim=(1, 3), dtype=torch.float32) for x in (keys.keys, keys.values))
        score = {
            "key_norms_small": -key,
            "key_norms": key,
            "vector_norms": value,
            "vector_norms_small": -value,
            "key_weighted_vector_norms": key.masked_fill(~keys.valid, -torch.inf).softmax(-1) * value,
        }.get(self.mode)
        if score is None:
            assert keys.received is not None
            score = keys.received.mean(1)
            if self.mode == "attention_weights":
                number = keys.index if keys.ordinal is None else keys.ordinal
                score = score / (number.amax(1, keepdim=True) - number + 1).clamp(min=1)
            elif self.mode.endswith("value_norm"):
                score = score * value
        return score[:, None].expand(keys.keys.shape[:3])


def _votes(attention: LayerAttention) -> Tensor:
    """``[B, q]`` float32: 1 for the queries after the last picture, else 0."""
    return behind_pictures(attention).float()
