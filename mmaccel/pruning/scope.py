"""SCOPE: the kept tokens cover all others, and the vision tower attends to them."""

from typing import Literal

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import AttentionGuided, Tap, TokenBatch, register
from ..method.tokens import by_row
from ._coverage import by_windows, cosines, covering
from ._shared import filled


@register
class SCOPE(AttentionGuided):
    """Greedy coverage, weighted by attention.

    *SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs*, NeurIPS 2025.

    With ``c_i`` the largest of zero and the cosines of token ``i`` to the picked ones, and ``a_j`` the attention that token
    ``j`` receives, the next pick is ``argmax_j a_j^alpha sum_i max(0, cos_ij - c_i)``; the lower slot on a tie.

    ``variant="official"``: a ratio is rounded half to even.

    Parameters
    ----------
    alpha : the power of attention, 1.
    combined : ``multi``, as above; ``add`` adds ``a_j^alpha`` to the sum. There the scale of attention counts: the program
        adds what all heads pay, here it is their mean.
    projected : compare what the language model would read, as a second program (AngelSlim) does; else the features of the
        tower.
    query, layer : whose attention counts, see :class:`AttentionGuided`.

    Paper and program: stitched tiles are pruned one by one, and newlines are dropped first, as in the program. AngelSlim takes
    all pictures of a prompt for one; here every picture has its own budget. Pictures of more than 4,096 tokens are picked from
    in runs of as many.
    """

    name = "scope"
    summary = "tokens that cover all others (facility location), weighted by attention"
    paper = "NeurIPS 2025"
    official_rounding = "half even"
    limits = {"alpha": "[0, inf)"}

    alpha: float = 1.0
    combined: Literal["multi", "add"] = "multi"
    projected: bool = False

    def taps(self) -> tuple[Tap, ...]:
        return super().taps() if self.projected else (*super().taps(), Tap("features"))

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, features ``[N, n, d]``, ``count [N]`` -> the picked slots."""
        (attention, seen), count = self.attention(tokens), count.to(tokens.valid.device)
        x = tokens.features if self.projected else tokens.signals["features"][:, 0]
        power = attention.masked_fill(~seen, 0.0) ** self.alpha
        weight, bonus = (
            (power, torch.zeros_like(power)) if self.combined == "multi" else (torch.ones_like(power), power)
        )

        def pick(part: slice, wanted: Tensor) -> Tensor:
            pairs, first = cosines(x[:, part], seen[:, part])
            return covering(pairs, seen[:, part], wanted, first, weight[:, part], bonus[:, part])

        picked = by_windows(seen, torch.minimum(count, seen.sum(1)), pick)
        return Reduction(filled(picked, tokens.valid, count), tokens.valid)
