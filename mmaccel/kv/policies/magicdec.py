"""MagicDec: the keys that a draft over a constant cache keeps, chosen by the last queries without scaling."""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from ...method import KeyBatch, register
from ..scoring.importance import by_group
from .snapkv import SnapKV, smoothed, window_attention


@register
class MagicDec(SnapKV):
    """Score keys by the unscaled attention of the prompt's last queries, pooled for every query head and summed in its group.

    *MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative Decoding*, ICLR 2025, arXiv
    2408.11049.

    The kept keys are the cache of a draft by the model itself, which does not grow with the prompt: ``lossless=True,
    draft="self"``. It pays for large batches and long prompts. The rule is SnapKV's, but for the logits, which the program does
    not divide by ``sqrt(D)``, and for the order: pooling comes before the sum over the query heads of a KV head. The program
    mixes heads and queries of its window unless ``8 g`` equals it, for ``g`` query heads a KV head; this does not.

    Parameters
    ----------
    window, kernel, pooling : as of ``snapkv``.
    gqa : how the query heads of one key head are reduced, behind pooling.
    """

    name = "magicdec"
    summary = "keys the last prompt queries attend to, for a draft over a constant cache"
    paper = "arXiv 2408.11049"

    gqa: Literal["mean", "max", "sum"] = "sum"

    def score(self, keys: KeyBatch) -> Tensor:
        paid, own = window_attention(replace(keys, scaling=1.0))
        # the keys of the window are infinite in every head, those that are none minus infinite
        pooled = smoothed(paid, own, keys, self.pooling, self.kernel)
        return by_group(pooled, keys.keys.shape[1], self.gqa)
