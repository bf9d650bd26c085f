"""MorphKV: a cache of constant size, whose old keys the newest queries choose."""

from typing import Literal

import torch
from torch import Tensor

from ...method import KeyBatch, Policy, register
from ..scoring.copies import of_first_keys
from .snapkv import own_keys


@register
class MorphKV(Policy):
    """Score old keys by the attention that the newest queries pay to the old keys alone.

    *Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs* (MorphKV), arXiv 2503.00979.

    With the logits summed over the query heads of a key head, ``s_k = reduce_{q in window} softmax_k(sum_h x[h, q, k])``, the
    softmax over the keys before those of the ``window`` newest queries, which always stay. The current query
    does not score. For long answers: ``cap=C, every=1, joint=True`` is the paper's cache, which evicts at every step.

    Parameters
    ----------
    window : number of newest queries; all but the last, which is the current one, score. 32 and the current one here.
    fusion : ``sum`` or ``max`` over these.

    Paper and program: the paper averages attention over heads; in the program, and here, logits are summed. The program trims
    the rows that it remembers by other masks than the keys where heads share keys; here queries are remembered.
    """

    name = "morphkv"
    summary = "old keys that the newest queries attend to, for a cache of constant size"
    paper = "arXiv 2503.00979"
    default_retain = 0.25
    limits = {"window": "[2, inf)"}

    window: int = 33
    fusion: Literal["sum", "max"] = "sum"

    def score(self, keys: KeyBatch) -> Tensor:
        heads, own = keys.keys.shape[1], keys.once(own_keys)
        old = (keys.valid & ~own)[:, None, None]
        queries, asks = keys.queries[:, :, :-1].float(), (keys.places[:, :-1] >= 0)[:, None, :, None]
        logits = queries.unflatten(1, (heads, -1)).sum(2) @ keys.keys.float().mT * keys.scaling
        paid = logits.masked_fill(~old, -torch.inf).softmax(-1).nan_to_num(0.0).masked_fill(~asks, 0.0)
        score = paid.sum(2) if self.fusion == "sum" or not paid.shape[2] else paid.amax(2)
        score = of_first_keys(score, keys.keys, keys.valid & ~own)
        return score.masked_fill(own[:, None], torch.inf).masked_fill(~keys.valid[:, None], -torch.inf)
