"""OTPrune: the kept tokens are distributed as all tokens are."""

import torch
from mmaccel_kernels.copies import first_copies, of_first, pairs_of_first
from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.tokens import by_row
from ._coverage import by_windows


@register
class OTPrune(ProjectorMethod):
    """Greedy log-determinant selection, a bound of the optimal transport between the kept tokens and all.

    *OTPrune: Distribution-Aligned Visual Token Pruning via Optimal Transport*, CVPR 2026.

    Every channel of what the language model would read is divided by its length over the tokens; with ``G`` the products of
    the tokens, ``K = I + gamma G G^T``. Tokens are picked one by one, each adding most to the determinant of the picked ones:
    ``argmax_j d_j``, where ``d`` starts as the diagonal of ``K`` and every pick ``i`` subtracts ``e_j^2``, ``e_j = (K_ij -
    sum_k c_kj c_ki) / sqrt(d_i)``. The lower slot on a tie. Computed in float64: late differences are small.

    ``variant="official"``: a ratio is rounded half to even.

    Parameters
    ----------
    gamma : 0.01.

    Paper and program: the program passes tokens on in the order of a Python set; here they stay in order. It takes all tokens
    of the assembled picture, newlines included, as is done here. Clips of more than 4,096 tokens are picked from in runs of as
    many.
    """

    name = "otprune"
    summary = "tokens that are distributed as all are (log-determinant)"
    paper = "CVPR 2026"
    official_rounding = "half even"
    unit = "picture"
    default_retain = 0.098
    limits = {"gamma": "(0, inf)"}

    gamma: float = 0.01

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the picked slots."""
        valid = tokens.valid

        def pick(part: slice, wanted: Tensor) -> Tensor:
            return self.picks(tokens.features[:, part], valid[:, part], wanted)

        return Reduction(by_windows(valid, count.to(valid.device), pick), valid)

    def picks(self, features: Tensor, valid: Tensor, count: Tensor) -> Tensor:
        """``[N, n]`` bool: ``count [N]`` of the ``valid [N, n]`` tokens of ``features [N, n, D]``."""
        x = features.double().masked_fill(~valid[..., None], 0.0)
        first = first_copies(x.float(), valid)
        x = x / x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        products = pairs_of_first(torch.bmm(x, x.mT), first)
        # without the ones on the diagonal, so that copies have equal columns
        kernel = pairs_of_first(self.gamma * torch.bmm(products, products.mT), first)
        left = (1.0 + kernel.diagonal(dim1=1, dim2=2)).masked_fill(~valid, -torch.inf)
        picked, row = torch.zeros_like(valid), torch.arange(len(x), device=x.device)
        turns = int(count.max()) if count.numel() else 0
        basis = x.new_zeros(len(x), turns, x.shape[1])
        for turn in range(turns):
            pick = left.argmax(1)
            picked[row, pick] |= turn < count
            spanned = torch.bmm(basis[row, :turn, pick][:, None], basis[:, :turn])[:, 0]
            share = of_first((kernel[row, pick] - spanned) / left[row, pick][:, None].clamp(min=1.0).sqrt(), first)
            basis[:, turn] = share
            left = left - share.square()
            left[row, pick] = -torch.inf
        return picked
