"""HoloV: every part of a picture keeps as many tokens as its share of the attention."""

from typing import Literal

import torch
from torch import Tensor

from ..core.masks import rank_in_groups
from ..core.reduction import Reduction
from ..method import AttentionGuided, TokenBatch, register
from ..method.tokens import by_row
from ._shared import filled, on_grid

#: the program's factor of attention, and what it adds to what it divides by
_SCALE, _LEAST = 1000.0, 1e-6


@register
class HoloV(AttentionGuided):
    """Crops of consecutive tokens share the budget by attention and by the spread of their similarities.

    *HoloV: Don't Just Chase "Highlighted Tokens" in MLLMs*, NeurIPS 2025.

    The ``n`` tokens of a tile are cut into ``crops`` runs in raster order, the first ``n mod crops`` one longer. In a crop,
    with ``a_i`` the attention that token ``i`` receives, times 1000, and ``v_i`` the variance of its cosines to the other
    tokens of the crop, scaled to the mean of ``a``, the score is the mean of ``alpha a_i + beta v_i``. A crop may keep
    ``floor(share count)`` tokens by its share of all scores; one more each goes to the crops of largest share, and what does
    not fit into a crop goes to the others, one by one by share. A crop keeps its most attended tokens.

    ``variant="official"``: a ratio is rounded down.

    Parameters
    ----------
    crops : 16, as for LLaVA; None is the program's number for Qwen, ``1024 / 576 n / count`` rounded down.
    alpha, beta : 1 and 0.09.
    spread : ``crop`` scales ``v`` in every crop, as the program does, so that it hardly changes any share; ``picture`` by the
        means of all crops (ours).
    query, layer : whose attention counts, see :class:`AttentionGuided`.

    Paper and program: where a crop is given more than it has, the program pads with zero vectors; here, as in the program of
    RESTORE, other crops keep more. The program leaves tokens in the order of attention; here they stay in order. It does not
    scale the attention of a crop of one token. Newline tokens are dropped first, and stitched tiles are pruned one by one.
    """

    name = "holov"
    summary = "attended tokens of every part of a picture"
    paper = "NeurIPS 2025"
    official_rounding = "down"
    limits = {"crops": "[1, inf)", "alpha": "[0, inf)", "beta": "[0, inf)"}

    crops: int | None = 16
    alpha: float = 1.0
    beta: float = 0.09
    spread: Literal["crop", "picture"] = "crop"

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, ``features [N, n, D]``, ``count [N]`` -> the most attended of every crop."""
        (attention, seen), count = self.attention(tokens), count.to(tokens.valid.device)
        seen = seen & on_grid(tokens)
        kept = torch.zeros_like(seen)
        for row, wanted in enumerate(torch.minimum(count, seen.sum(1)).tolist()):
            at = seen[row].nonzero()[:, 0]
            if wanted:
                kept[row, at] = self.picks(tokens.features[row, at], attention[row, at], wanted)
        return Reduction(filled(kept, tokens.valid, count), tokens.valid)

    def picks(self, features: Tensor, attention: Tensor, count: int) -> Tensor:
        """``[n]`` bool: ``count`` tokens of ``features [n, D]`` with ``attention [n]``."""
        size, place = len(features), torch.arange(len(features), device=features.device)
        crops = min(size, max(1, int(1024 / 576 * size / count)) if self.crops is None else self.crops)
        long, more = -(-size // crops), size % crops or crops
        # the first `more` crops have `long` tokens, the others one less
        ends = place.new_tensor([min(i + 1, more) * long + max(0, i + 1 - more) * (long - 1) for i in range(crops)])
        crop = torch.bucketize(place, ends, right=True)
        sizes = torch.bincount(crop, minlength=crops)
        share = self.scores(features, attention, crop, ends - sizes, sizes)
        share = share / (share.sum() + _LEAST)
        given = (share * count).floor().long()
        order = share.argsort(descending=True, stable=True)
        given[order[: count - int(given.sum())]] += 1
        given = torch.minimum(given, sizes)
        while short := count - int(given.sum()):
            given[order[(given < sizes)[order]][:short]] += 1
        return rank_in_groups(crop[None], crops, attention[None])[0] < given[crop]

    def scores(self, features: Tensor, attention: Tensor, crop: Tensor, first: Tensor, sizes: Tensor) -> Tensor:
        """``[crops]``: the score of every crop; ``crop [n]`` of each token, ``first`` and ``sizes [crops]`` of the crops."""
        x = features.float()
        x = x / (x.norm(dim=-1, keepdim=True) + _LEAST)
        own, width = torch.arange(int(sizes.max()), device=x.device), len(sizes)
        at = (first[:, None] + own).clamp(max=len(x) - 1)
        real = own < sizes[:, None]
        parts = x[at].masked_fill(~real[..., None], 0.0)
        like = torch.bmm(parts, parts.mT)
        like.diagonal(dim1=1, dim2=2).zero_()
        rest = (sizes - 1).clamp(min=1)[:, None]
        mean = like.sum(2) / rest
        # the zero on the diagonal counts as a cosine, as in the program
        apart = ((like - mean[..., None]).square() * real[:, None]).sum(2) / rest
        apart = apart.masked_fill(~real | (sizes < 2)[:, None], 0.0)
        paid = (attention[at] * _SCALE).masked_fill(~real, 0.0)
        totals = [paid.abs().sum(1), apart.abs().sum(1)]
        if self.spread == "picture":
            totals = [one.sum().expand(width) / len(x) * sizes for one in totals]
        scale = (totals[0] / sizes) / (totals[1] / sizes + _LEAST)
        return (self.alpha * paid.sum(1) + self.beta * apart.sum(1) * scale) / sizes
