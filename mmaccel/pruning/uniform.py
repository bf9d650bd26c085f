"""Evenly spaced choice, the baseline that uses only the order of the tokens."""

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register


@register
class Uniform(ProjectorMethod):
    """Keep ``k`` of ``n`` tokens at an even stride: slot ``floor((i + 1/2) n / k)`` for ``i = 0 .. k-1``.

    The 1/2 puts every kept token in the middle of its interval. Tokens are in raster order, so the kept columns shift from
    row to row unless ``n / k`` divides the width; ``pool`` respects the grid.
    """

    name = "uniform"
    summary = "evenly strided tokens (baseline)"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``[N, n]`` valid slots, ``count [N]`` of each row stay; whole numbers throughout."""
        valid = tokens.valid
        size, count = valid.sum(1), count.to(valid.device)
        step = torch.arange(int(count.max()) if count.numel() else 0, device=valid.device)[None]
        slots = (2 * step + 1) * size[:, None] // (2 * count[:, None]).clamp(min=1)
        batch, i = (step < count[:, None]).nonzero(as_tuple=True)
        kept = torch.zeros_like(valid)
        kept[batch, slots[batch, i]] = True
        return Reduction(kept, valid)
