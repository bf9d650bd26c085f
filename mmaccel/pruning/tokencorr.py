"""Token-level correlation: how much a tile repeats itself says how many of its tokens stay, the CLS token says which."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction, top_mask
from ..method import AttentionGuided, Tap, TokenBatch, register
from ..method.blocks import BLOCK
from ._shared import filled


@register
class TokenCorr(AttentionGuided):
    """Information density by the similarity of keys, and sampling by late and early CLS attention.

    *Token-level Correlation-guided Compression for Efficient Multimodal Document Understanding*, arXiv 2407.14439.

    A token is redundant if more than ``counterparts`` of the other tokens of its tile have keys with a cosine above
    ``similarity``. With ``r`` the share of redundant tokens, ``ceil((1 - r) n)`` of the ``n`` tokens of the tile stay: the
    share ``late`` of these by CLS attention in the layer the language model reads (global information), the others by that of
    the layer ``early`` (local information).

    The content decides; the budget is an upper limit (``retain=1.0``: none), and one token of a tile always stays.

    Parameters
    ----------
    similarity, counterparts, late : 0.8, a tenth of the tile, and half; ours, see below.
    early : tower layer; a float is a share of its depth. The middle one by default (ours).
    query, layer : whose attention counts, and the late layer; ``query="all"`` ranks by the attention received from all
        tokens, for towers without a CLS token. Keys are those of the late layer, mean over heads.

    Paper and program: no program is public, and what we read of the paper names neither the bar of similarity nor the number of
    counterparts, layers and shares: all are options here. The authors report results after fine-tuning, in front of a
    connector that joins four neighbours. Newline tokens are dropped.
    """

    name = "tokencorr"
    summary = "as many tokens of a tile as do not repeat others, by late and early CLS attention (adaptive)"
    paper = "arXiv 2407.14439"
    budget = "adaptive"
    default_retain = 1.0
    limits = {"similarity": "[0, 1]", "counterparts": "[0, 1]", "late": "[0, 1]"}

    similarity: float = 0.8
    counterparts: float = 0.1
    late: float = 0.5
    early: float = 0.5

    def taps(self) -> tuple[Tap, ...]:
        return (Tap(self._kind, (self.early, self.layer)), Tap("keys", (self.layer,)))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, 2, n]``, keys ``[N, n, d]``, ``count [N]`` -> what is not repeated."""
        early, late = tokens.signals[self._kind].float().unbind(1)
        seen = tokens.valid & ~late.isnan() & ~early.isnan()
        size, count = seen.sum(1), count.to(seen.device)
        counterparts = count_similar(tokens.signals["keys"][:, 0], seen, self.similarity)
        repeated = (counterparts > self.counterparts * size[:, None]) & seen
        # of n tokens those that are not redundant are (1 - r) n
        room = torch.minimum(size - repeated.sum(1), count).clamp(min=1)
        best = top_mask(late, seen, (room * self.late).long())
        best = best | top_mask(early, seen & ~best, room - best.sum(1))
        # where no token has a source in the tower nothing can be said
        least = torch.where(size > 0, count.clamp(max=1), count)
        return Reduction(filled(best & (count > 0)[:, None], tokens.valid, least), tokens.valid)


def count_similar(x: Tensor, seen: Tensor, similarity: float) -> Tensor:
    """``[N, n]`` long: how many other tokens of ``x [N, n, d]`` that are ``seen`` have a cosine above ``similarity``."""
    x = normalize(x.float().masked_fill(~seen[..., None], 0.0), dim=-1)
    height = max(1, BLOCK // max(1, seen.numel()))
    counts = [((rows @ x.mT > similarity) & seen[:, None]).sum(2) for rows in x.split(height, 1)]
    # without itself
    return of_first(torch.cat(counts, 1) - 1, first_copies(x, seen)).clamp(min=0)
