"""MC-MoE: experts with little weight are left out, and more of them for unimportant tokens of a prompt."""

from collections.abc import Sequence

from torch import Tensor

from ..core.budget import layer_at
from ..core.reduction import top_mask
from ..method import ExpertMethod, register


@register
class MCMoE(ExpertMethod):
    """Leave out experts that the router weighs little, and all experts of the least important tokens.

    *Mixture Compressor for Mixture-of-Experts LLMs Gains More*, ICLR 2025, arXiv 2410.06270: its online dynamic pruning. The
    compression of weights in the same paper is not here.

    1. A token leaves out its experts ``j`` with ``w_j < beta w_1``, ``w_1`` its largest weight.
    2. In a prompt tokens are ranked by the attention that they receive, mean over heads and the queries that see them, times
       the sum of absolute values of the MLP's input. Of ``T`` tokens the ``floor(highest T)`` first use all their experts, and
       the ``floor(lowest T)`` last use none.

    Weights are scaled to the sum that they had. Experts that all tokens share keep running, and nothing changes in the cache.
    Steps of decoding follow rule 1, and read fewer weights. It works in models with experts (Qwen3-VL-MoE, Qwen3.5-MoE,
    GLM-4.5V and others), from transformers 5.23 on, with methods that drop tokens: ``["divprune", "mcmoe"]``.

    ``variant="official"``: the score adds up the wrong axis of the attention, as the authors' program does, which gives 1: the
    sum of absolute values, divided by the number of tokens from it on. So later tokens are more important.

    Parameters
    ----------
    beta : float from 0 to 1, default 0.5 as in the program's class; it has 0.40 to 0.62 by layer for Mixtral, the median of
        ``w_2 / w_1`` on text. 0 leaves out none.
    lowest : float from 0 to 1, default 0 as released (0.1 in the class).
    highest : float from 0 to 1, default 0.02 as released (0.1 in the class).
    first : int from 0 on, or float from 0 to below 1; the first layer, or its share of the depth, default 2 of 32. The program
        has a list of layers for Mixtral, whose first two lose most.
    """

    name = "mcmoe"
    summary = "tokens use fewer experts: those of little weight are left out, and all of the least important tokens"
    paper = "arXiv 2410.06270"
    limits = {
        "beta": "[0, 1]",
        "lowest": "[0, 1]",
        "highest": "[0, 1]",
        "first": "[0, inf) or [0.0, 1.0)",
    }

    beta: float = 0.5
    lowest: float = 0.0
    highest: float = 0.02
    first: float = 2 / 32

    @property
    def ranks(self) -> bool:  # type: ignore[override]
        """Whether any token is ranked."""
        return bool(self.lowest or self.highest)

    def layers(self, depth: int) -> Sequence[int]:
        """From ``first`` on; of a share at most the last."""
        first = layer_at(self.first, depth)
        return range(min(first, depth - 1) if isinstance(self.first, float) else first, depth)

    def uses(self, weights: Tensor, hidden: Tensor, received: Tensor | None, real: Tensor) -> Tensor:
        """``[B, q, k]`` bool."""
        best = weights.amax(-1, keepdim=True)
        kept = weights >= self.beta * best
        if received is None:
            return kept
        size = real.sum(1)
        if self.official:
            received = 1 / (size[:, None] - real.cumsum(1) + 1).clamp(min=1)
        score = received * hidden.float().abs().sum(-1)
        # rounded first, so that every machine truncates alike
        high, low = (((size.double() * share).round(decimals=6)).long() for share in (self.highest, self.lowest))
        first, last = top_mask(score, real, high)[..., None], top_mask(-score, real, low)[..., None]
        return (kept | first) & ~last
