"""Maximal marginal relevance: important tokens that are unlike those picked before."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from mmaccel_kernels.greedy import by_row as products
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import AttentionGuided, TokenBatch, register
from ..method.tokens import by_row
from ._shared import filled

_LEAST = 1e-6


@register
class MMR(AttentionGuided):
    """The selection of IDPruner, with the attention of the vision tower in place of its trained scorer.

    *IDPruner*, arXiv 2602.13315; maximal marginal relevance is Carbonell and Goldstein's, SIGIR 1998.

    With ``a_j`` the attention that token ``j`` receives, moved to [0, 1] over the tile, and ``s_j`` its largest cosine to a
    picked token, the next pick is ``argmax_j importance a_j - (1 - importance) s_j``; the first is the most attended. The
    lower slot on a tie.

    ``variant="official"``: a ratio is rounded half to even.

    Parameters
    ----------
    importance : the weight of attention beside unlikeness, 0.5.
    parallel : how many are picked by the same ``s``, 1.
    query, layer : whose attention counts, see :class:`AttentionGuided`.

    Paper and program: the scorer is trained with a model, and its weights are not part of mmaccel. The program takes all
    pictures of a prompt for one; here every picture has its own budget. Newline tokens are dropped first, and stitched tiles
    are pruned one by one.
    """

    name = "mmr"
    summary = "attended tokens that are unlike each other (maximal marginal relevance)"
    paper = "arXiv 2602.13315"
    official_rounding = "half even"
    limits = {"importance": "[0, 1]", "parallel": "[1, inf)"}

    importance: float = 0.5
    parallel: int = 1

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, ``features [N, n, D]``, ``count [N]`` -> the picked slots."""
        (score, seen), count = self.attention(tokens), count.to(tokens.valid.device)
        low = score.masked_fill(~seen, torch.inf).amin(1, keepdim=True)
        span = score.masked_fill(~seen, -torch.inf).amax(1, keepdim=True) - low
        worth = (score - low) / (span + _LEAST)
        x = normalize(tokens.features.float().masked_fill(~seen[..., None], 0.0), dim=-1)
        first, row = first_copies(x, seen), torch.arange(len(x), device=x.device)
        near = torch.full_like(score, -torch.inf)
        picked, room = torch.zeros_like(seen), torch.minimum(count, seen.sum(1))
        merit = worth
        for turn in range(int(room.max()) if room.numel() else 0):
            if turn and turn % self.parallel == 0:
                merit = self.importance * worth - (1 - self.importance) * near
            pick = merit.masked_fill(picked | ~seen, -torch.inf).argmax(1)
            picked[row, pick] |= turn < room
            like = of_first(products(x, x[row, pick]), first)
            if first is not None:
                like = like.masked_fill(first == first[row, pick][:, None], 1.0)
            near = torch.maximum(near, like)
        return Reduction(filled(picked, tokens.valid, count), tokens.valid)
