"""DivPrune: the kept tokens are as far apart as possible."""

import torch
from mmaccel_kernels.maxmin import max_min
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register

#: cosine distances below this are rounding, and count as zero: exact copies then tie on every machine
_NOISE = 1e-6


@register
class DivPrune(ProjectorMethod):
    """Greedy max-min diversity on the tokens the language model would read.

    *DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models*, CVPR 2025, arXiv 2503.02175.

    With ``d(i, j) = 1 - cos(x_i, x_j)`` the first token is the one whose nearest neighbour is farthest,
    ``argmax_i min_{j != i} d(i, j)``; each next one is ``argmax_i min_{j picked} d(i, j)``. On a tie the lower slot is
    picked. Needs no attention, no CLS token and no text.

    The first pick needs all pairs. Their distances are kept for the later picks, if there are not many thousand tokens;
    otherwise each pick costs one product ``[n, D] @ [D]``. The authors keep 9.8 % (56 of LLaVA-1.5's 576).

    ``variant="official"``: a ratio is rounded half to even.

    Paper and program: the program does not exclude tokens it has picked, so once fewer than ``count`` distinct directions
    are left it picks tokens again and returns duplicates; here every token is picked once, and the count is met. It works
    on all tokens of the assembled image, including newlines, in half precision; so does this (``unit = "picture"``), in
    float32.
    """

    name = "divprune"
    summary = "tokens that are far from each other (max-min cosine distance)"
    paper = "arXiv 2503.02175"
    official_rounding = "half even"
    unit = "picture"
    default_retain = 0.098

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the picked slots."""
        return Reduction(max_min_diverse(tokens.features, tokens.valid, count), tokens.valid)


def max_min_diverse(features: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: ``count [N]`` slots picked greedily, each farthest from those before it (see :class:`DivPrune`)."""
    x = normalize(features.float().masked_fill(~valid[..., None], 0.0), dim=-1)
    return max_min(x, valid, count.to(valid.device), _NOISE) > -torch.inf
