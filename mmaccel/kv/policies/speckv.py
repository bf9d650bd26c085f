"""SpecKV: keep the keys that a smaller model's answer attends to."""

from typing import Literal

import torch
from torch import Tensor

from ...method import DraftPolicy, KeyBatch, LayerAttention, register
from ...method.blocks import row_blocks
from ...method.model_options import Loaded
from ..scoring.copies import of_first_keys
from ..scoring.importance import by_group
from .snapkv import own_keys, smoothed, window_attention, window_sight


@register
class SpecKV(DraftPolicy):
    """Score keys by the attention that the prompt's last queries, and those of an answer by a smaller model, pay in this model.

    *Draft-based Approximate Inference for LLMs* (SpecKV), arXiv 2506.08373.

    The draft writes up to ``lookahead`` tokens. With ``A`` the softmax over all keys that a query may attend to, in float32,
    ``s_k = pool( reduce_{h in group, q} A[h, q, k] )`` over the queries ``q`` of the last ``window`` prompt tokens and of what
    was written, for the keys before the window; the window's own keys always stay. Nothing of what was written stays.

    Parameters
    ----------
    draft : folder or hub id of a smaller model of the same family, or the model, loaded; by default ``draft`` beside the
        model's weights.
    lookahead : tokens that the draft writes at most. In the program as many as the answer may have; each costs a step of the
        draft, so here 32.
    window, kernel : 32 and 7 as in the authors' configurations; an odd kernel.
    reduce : how the queries of the window and the heads of one key head are joined, ``max`` as in the authors'
        configurations, or ``mean``.
    pooling : ``max`` as in these, or ``avg``.

    Paper and program: the program reads what was written together with the prompt, here the model reads it when the prompt is
    over, which gives the same queries; the first step of the answer does without it in both. Kept keys stay in their order.
    The program's sparse prefill, which reads only the keys chosen this way and a window, is not offered. While decoding
    (``every``, ``cap``) the window alone scores. Nothing is evicted before the prompt is over, so that for a moment the whole
    cache is held.
    """

    name = "speckv"
    summary = "keys that the answer of a smaller model of the same family attends to in this one"
    paper = "arXiv 2506.08373"
    default_retain = 0.25
    limits = {"window": "[1, inf)", "kernel": "odd"}

    draft: str | Loaded = ""
    lookahead: int = 32
    window: int = 32
    kernel: int = 7
    reduce: Literal["max", "mean"] = "max"
    pooling: Literal["max", "avg"] = "max"

    def score(self, keys: KeyBatch) -> Tensor:
        if self.reduce == "mean":
            paid, own = window_attention(keys)
            score = by_group(paid, keys.keys.shape[1], "mean")
        else:
            score, own = most_paid(keys)
        return smoothed(score, own, keys, self.pooling, self.kernel)


def most_paid(keys: KeyBatch) -> tuple[Tensor, Tensor]:
    """The most that any of the last queries, in any head of the group, pays to each key but their own, ``[B, Hkv, K]`` float32;
    and which keys are their own, ``[B, K]`` bool."""
    votes, own = keys.places >= 0, keys.once(own_keys)
    attention = LayerAttention(keys.queries, keys.keys, window_sight(keys)[:, None], keys.scaling, votes)
    most = keys.keys.new_zeros(keys.keys.shape[:3], dtype=torch.float32)
    for start, stop in row_blocks(attention):
        paid = attention.attention(start, stop).nan_to_num(0.0).amax(2)
        most = torch.maximum(most, by_group(paid, most.shape[1], "max"))
    most = most.masked_fill(own[:, None], 0.0)
    return of_first_keys(most, keys.keys, keys.valid & ~own), own
