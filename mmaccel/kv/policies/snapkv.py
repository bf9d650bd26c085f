"""SnapKV: keep the keys that the last queries of the prompt attend to."""

from typing import Literal

import torch
from mmaccel_kernels.importance import importance
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from ...method import KeyBatch, Policy, register
from ..scoring.copies import of_first_keys
from ..scoring.importance import by_group


@register
class SnapKV(Policy):
    """Score keys by the attention paid by the prompt's last queries, smoothed along the sequence.

    *SnapKV: LLM Knows What You are Looking for Before Generation*, NeurIPS 2024, arXiv 2404.14469.

    ``s_k = pool( reduce_{h in group} mean_{q in window} A[h, q, k] )`` for the keys before the window; the window's own
    keys always stay. ``A`` is the softmax over all keys a query may attend to, in float32.

    Parameters
    ----------
    window : number of queries at the end of the prompt that score. 32 as in the authors' configurations.
    kernel : odd width of the pooling, which keeps neighbours of an important key. 5 as in the program.
    pooling : ``avg`` as in the program, ``max`` as in the paper.
    gqa : how the query heads of one key head are reduced, before pooling. ``mean`` as in kvpress; with ``avg`` pooling and
        ``mean`` or ``sum`` the order of the two does not matter.

    Paper and program: the paper describes max pooling (of width 7 in most of its runs), the program averages by
    default and counts zeros beyond both ends, so keys at the ends score lower; so does this. The program repeats the key
    heads first and stores one selection per query head; here there is one per key head, and memory is really freed. It
    sums over the window; the mean used here ranks the same.
    """

    name = "snapkv"
    summary = "keys the last prompt queries attend to"
    paper = "arXiv 2404.14469"
    default_retain = 0.25
    limits = {"window": "[1, inf)", "kernel": "odd"}

    window: int = 32
    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"
    gqa: Literal["mean", "max", "sum"] = "mean"

    def score(self, keys: KeyBatch) -> Tensor:
        paid, own = window_attention(keys)
        return smoothed(by_group(paid, keys.keys.shape[1], self.gqa), own, keys, self.pooling, self.kernel)


def smoothed(score: Tensor, own: Tensor, keys: KeyBatch, pooling: Literal["avg", "max"], kernel: int) -> Tensor:
    """``score [B, Hkv, K]`` pooled over ``kernel`` neighbours; the keys ``own [B, K]`` of the last queries always stay."""
    pool = avg_pool1d if pooling == "avg" else max_pool1d
    # in double precision, so that sums of the same few terms in another order are equal after rounding
    score = pool(score.double(), kernel, stride=1, padding=kernel // 2).float()
    return score.masked_fill(own[:, None], torch.inf).masked_fill(~keys.valid[:, None], -torch.inf)


def window_attention(keys: KeyBatch, sight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The attention paid by the last queries, mean over them and zero for their own keys, ``[B, Hq, K]`` float32; and which
    keys are their own, ``[B, K]`` bool. They see ``sight [B, W, K]`` bool, by default as :func:`window_sight`."""
    # queries of padding do not count
    votes, own = keys.places >= 0, keys.once(own_keys)
    sight = window_sight(keys) if sight is None else sight
    sums = importance(keys.queries, keys.keys, scaling=keys.scaling, visible=sight[:, None])
    paid = (sums / votes.sum(1).clamp(min=1)[:, None, None]).masked_fill(own[:, None], 0.0)
    return of_first_keys(paid, keys.keys, keys.valid & ~own), own


def window_sight(keys: KeyBatch) -> Tensor:
    """``[B, W, K]`` bool: which keys each of the last queries sees; padding sees none."""
    causal = keys.index[:, None, :] <= keys.places[:, :, None]
    return keys.valid[:, None, :] & causal & (keys.places >= 0)[:, :, None]


def own_keys(keys: KeyBatch) -> Tensor:
    """``[B, K]`` bool: the keys of the last queries."""
    first = keys.places.masked_fill(keys.places < 0, torch.iinfo(keys.places.dtype).max).amin(1, keepdim=True)
    return keys.index >= first
