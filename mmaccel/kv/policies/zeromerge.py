"""ZeroMerge: the keys that leave are merged into a few, which weigh as many as they were."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.masks import suffix_sums
from ...method import KeyBatch, register
from .a2sf import A2SF


@register
class ZeroMerge(A2SF):
    """Keep the keys with most attention and the newest ones, and merge all others into few, which attention counts as many.

    *ZeroMerge: Parameter-Free KV Cache Compression for Memory-Efficient Long-Context LLMs*, arXiv 2503.10714.

    ``s_k = sum_q forget^(Q - 1 - q) A[h, q, k]``, summed over the query heads of a key head. Of a budget of ``B`` keys a head
    keeps the newest ``tail``, the best others, and the number of ``compact``, into which all that leave are merged: at the end
    of a prompt in as many runs of equal length in the order of the sequence, while decoding each into the one of largest
    product with it, as means of all tokens that are in it. ``merge_weight log n`` is added to the logits of a key of ``n``
    tokens.

    Parameters
    ----------
    forget : 0.98 as in the program.
    tail : newest keys that stay; an int is a count, a float a share of the budget. 0.1 as in the paper; 0.4 in its script.
    compact : ``residual:1``, one merged key as in the paper.
    merge_weight : 1 as in the paper; 0.6 in its script.
    recent : keys that stay beside the ``tail``; none by default.

    With ``joint`` and ``every=1`` a key is merged at every step, as in the paper; the recipe ``zeromerge-decode`` does so after
    every 16 steps. A step reads merged keys under a mask of numbers, in place of a kernel that reads keys as they are stored.
    Keys that a codec has packed are neither merged nor merged into.

    Paper and program: in the program merged keys stand in front of all others; here each takes the place of one that would have
    left next.
    """

    name = "zeromerge"
    summary = "keys with most attention and the newest, the others merged into few that weigh as many as they were"
    paper = "arXiv 2503.10714"
    limits = {"tail": "[0, inf) or [0.0, 1.0]"}

    forget: float = 0.98
    recent: float = 0
    tail: float = 0.1
    compact: str = "residual:1"

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.received is not None and keys.count is not None
        compete = keys.valid if self.joint else keys.valid & keys.visual
        newest = self.tail if isinstance(self.tail, int) else (keys.count.double() * self.tail).long()[:, None]
        return keys.received.masked_fill((compete & (suffix_sums(compete) <= newest))[:, None], torch.inf)
