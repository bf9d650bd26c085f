"""Representation shift: keep the tokens that a layer of the vision tower changes most."""

from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, Tap, TokenBatch, register


@register
class RepresentationShift(ProjectorMethod):
    """Rank tokens by how far an MLP of the vision tower moves them.

    *Representation Shift: Unifying Token Compression with FlashAttention*, ICCV 2025, arXiv 2508.00367.

    ``s_j = |F(x_j) - x_j|_2``, with ``F`` the second half of a layer, ``F(x) = x + MLP(norm(x))``: the length of what the MLP
    adds. The ``count`` highest stay, in raster order. Needs no attention map and no CLS token. Where several patches become
    one token of the language model, their shifts are averaged; a scale that a tower applies behind the MLP is left out.

    Parameters
    ----------
    layer : tower layer; ``None`` is the one the language model reads, a float a share of the tower's depth.

    Paper and program: the paper drops tokens between layers of an encoder, at some of its first half, and also ranks by the
    attention's half or the whole layer and by other distances; here the MLP's shift ranks what reaches the language model.
    Newline tokens are dropped first.
    """

    name = "representation-shift"
    summary = "tokens that an MLP of the vision tower changes most"
    paper = "arXiv 2508.00367"
    unit = "tile"

    layer: float | None = None

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("shift", (self.layer,)),)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``shift [N, 1, n, 1]``, ``count [N]`` -> the highest; tokens without a source are dropped first."""
        return Reduction.top(tokens.signals["shift"][:, 0, :, 0], tokens.valid, count)
