"""RPC: the text of a long answer is compressed at intervals, the prompt is not."""

from typing import Literal

import torch
from torch import Tensor

from ...method import KeyBatch, register
from ..scoring.copies import of_first_keys
from .snapkv import SnapKV, own_keys, smoothed


@register
class RPC(SnapKV):
    """Keep those keys of the answer that the newest queries attend to, again after every ``every`` tokens.

    *Reasoning Path Compression: Compressing Generation Trajectories for Efficient LLM Reasoning*, arXiv 2505.13866.

    After ``j`` times ``every`` tokens, ``j growth every`` keys of the answer stay, and the ``window`` newest. ``s_k = pool(
    sum_{q in window} softmax_k(x[h, q, k]))``, mean over heads, with the softmax over the keys between the prompt and the
    window. A prompt is scored as by ``snapkv``, where a smaller ``retain`` than 1 asks for that.

    Parameters
    ----------
    every, growth : 1024 tokens and a quarter, as in the paper.
    window, kernel : 32 and 7 as in the paper; an odd kernel.
    aggregation : ``all`` heads choose the same keys, as in the program by default, or those of a ``group`` with one key head.
    """

    name = "rpc"
    summary = "keys of a long answer that its newest queries attend to; the prompt stays"
    paper = "arXiv 2505.13866"
    default_retain = 1.0
    needs_age = True

    joint: bool = True
    every: int = 1024
    growth: float = 0.25
    kernel: int = 7
    aggregation: Literal["all", "group"] = "all"

    @property
    def beyond(self) -> int:  # type: ignore[override]
        """The newest keys."""
        return self.window

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """Whether all heads keep the same keys."""
        return self.aggregation == "all"

    def score(self, keys: KeyBatch) -> Tensor:
        heads = keys.keys.shape[1]
        if keys.answer is None:
            score = super().score(keys)
            return score.mean(1, keepdim=True).expand_as(score) if self.shared else score
        own = keys.once(own_keys)
        written = keys.valid & (keys.index >= keys.answer[:, None]) & ~own
        logits = keys.queries.float().unflatten(1, (heads, -1)) @ keys.keys.float().mT[:, :, None] * keys.scaling
        asks = (keys.places >= 0)[:, None, None, :, None]
        paid = logits.masked_fill(~written[:, None, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        paid = of_first_keys(paid.masked_fill(~asks, 0.0).sum(3).mean(2), keys.keys, written)
        paid = paid.mean(1, keepdim=True).expand_as(paid) if self.shared else paid
        return smoothed(paid, ~written, keys, self.pooling, self.kernel)
