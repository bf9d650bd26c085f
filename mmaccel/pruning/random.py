"""Random choice, the baseline that every selector should beat."""

import torch
from torch import Tensor

from ..core.masks import ranks
from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register


@register
class Random(ProjectorMethod):
    """Keep tokens drawn uniformly without replacement; the tokens of a picture are drawn together.

    Every slot gets a number from a generator seeded with ``seed``, and the ``count`` highest stay. The numbers depend only
    on the slot, so a picture keeps the same tokens alone and in any batch, on the CPU and on a GPU, and the tokens of a
    smaller budget are among those of a larger one. Two pictures of equal size keep the same slots; average over seeds where
    that matters.

    Parameters
    ----------
    seed : draws of different seeds are independent. The default 0 is ours.
    """

    name = "random"
    summary = "a seeded random choice (baseline)"
    unit = "picture"

    seed: int = 0

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``[N, n]`` valid slots, ``count [N]`` of each row stay."""
        rows, slots = tokens.valid.shape
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        # double precision, so without ties; drawn one after the other, so a longer row begins with the same numbers
        draw = ranks(torch.rand(slots, generator=generator, dtype=torch.float64).argsort(stable=True))
        # padding to a longer row changes ranks, but not which of two is higher
        return Reduction.top(draw.to(tokens.valid.device).expand(rows, -1), tokens.valid, count)
