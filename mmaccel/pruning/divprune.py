"""DivPrune: the kept tokens are as far apart as possible."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..method import ProjectorMethod, TokenBatch
from ..reduction import Reduction
from ..registry import register

#: cosine distances below this are rounding, and count as zero: exact copies then tie on every machine
_NOISE = 1e-6
#: entries of the block of distances held at once while the first token is sought
_BLOCK = 1 << 24


@register
@dataclass(frozen=True)
class DivPrune(ProjectorMethod):
    """Greedy max-min diversity on the tokens the language model would read.

    *DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models*, CVPR 2025, arXiv 2503.02175.

    With ``d(i, j) = 1 - cos(x_i, x_j)`` the first token is the one whose nearest neighbour is farthest,
    ``argmax_i min_{j != i} d(i, j)``; each next one is ``argmax_i min_{j picked} d(i, j)``. Equal distances go to the
    lower slot. Needs no attention, no CLS token and no text.

    Every pick costs one product ``[n, D] @ [D]``, and only the running minimum ``[N, n]`` is stored; the first pick
    needs all pairs and takes them in blocks of rows. The authors' default keeps 9.8 % (56 of LLaVA-1.5's 576).

    Paper and program: the program never excludes what it has picked, so once fewer than ``count`` different directions
    are left it picks a token again and emits copies; here a picked token is out, and the count is met. It takes all
    tokens of the assembled image, newlines included, as ``unit = "picture"`` does here, in half precision; here in
    float32. It rounds the count half to even.
    """

    name = "divprune"
    summary = "tokens that are far from each other (max-min cosine distance)"
    paper = "arXiv 2503.02175"
    unit = "picture"
    default_retain = 0.098

    def official_count(self, retain: float, size: int) -> int:
        """The program rounds half to even."""
        return round(retain * size)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the picked slots."""
        return Reduction(max_min_diverse(tokens.features, tokens.valid, count), tokens.valid)


def max_min_diverse(features: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: ``count [N]`` slots picked greedily, each farthest from those before (see :class:`DivPrune`)."""
    x = normalize(features.float().masked_fill(~valid[..., None], 0.0), dim=-1)
    picked, count = torch.zeros_like(valid), count.to(valid.device)
    rows = torch.arange(len(x), device=x.device)
    nearest = _nearest(x, valid)
    for i in range(int(count.max()) if count.numel() else 0):
        pick = nearest.masked_fill(picked | ~valid, -torch.inf).argmax(1)
        picked[rows, pick] |= i < count
        away = _distance(torch.bmm(x, x[rows, pick, :, None])[..., 0])
        nearest = away if i == 0 else torch.minimum(nearest, away)
    return picked


def _nearest(x: Tensor, valid: Tensor) -> Tensor:
    """``[N, n]``: the distance of every token to the nearest other one of its row, without all pairs at once."""
    slots = x.shape[1]
    height = max(1, _BLOCK // max(1, len(x) * slots))
    parts = []
    for top in range(0, slots, height):
        away = _distance(torch.bmm(x[:, top : top + height], x.transpose(1, 2)))
        own = torch.arange(top, top + away.shape[1], device=x.device)[:, None] == torch.arange(slots, device=x.device)
        parts.append(away.masked_fill(own | ~valid[:, None], torch.inf).amin(2))
    return torch.cat(parts, 1) if parts else x.new_zeros(len(x), 0)


def _distance(cosine: Tensor) -> Tensor:
    away = 1.0 - cosine
    return away.masked_fill(away < _NOISE, 0.0)
