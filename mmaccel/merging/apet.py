"""ApET: tokens that others cannot reconstruct stay, and the rest merge into them."""

from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.reconstruction import BasisSlots, merged_by_error


@register
class ApETMerge(ProjectorMethod):
    """Merging by approximation error.

    *ApET: Approximation-Error Guided Token Compression for Efficient VLMs*, CVPR 2026.

    ``basis`` tokens are sampled, each farthest from those before it. Every token is approximated by a combination of these
    (least squares with ``ridge``), and the ``count`` tokens of largest error stay. Every other token flows into the kept one of
    largest cosine, whose value becomes the mean of all. No attention is looked at.

    ``variant="official"``: ``basis_slots="overwrite"`` where it is ``none``, and a ratio is rounded down.

    Parameters
    ----------
    basis, ridge : 10 and 1e-5.
    start : the token that is sampled first, counted from 0; the last one in smaller pictures. The program draws it.
    basis_slots : with ``overwrite`` the kept tokens of smallest error, one for each of the basis, hold the basis instead, in
        raster order, as the program for LLaVA does; with ``mix`` the mean with it, as the one for Qwen. Nothing flows into
        them. ``none`` keeps them.

    Paper and program: the program merges features of the tower for LLaVA, and what the language model would read for Qwen, as
    is done here. The first token is drawn there, and named here. Newlines are dropped first, and stitched tiles are reduced
    one by one.
    """

    name = "apet-merge"
    summary = "tokens that others cannot reconstruct, the rest merged into the nearest of them"
    paper = "CVPR 2026"
    unit = "tile"
    official_rounding = "down"
    default_retain = 0.25
    limits = {"basis": "[1, inf)", "ridge": "(0, inf)", "start": "[0, inf)"}

    basis: int = 10
    ridge: float = 1e-5
    start: int = 0
    basis_slots: BasisSlots = "none"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> kept tokens, and links of the others."""
        slots: BasisSlots = "overwrite" if self.official and self.basis_slots == "none" else self.basis_slots
        return merged_by_error(tokens, count, self.basis, self.ridge, self.start, slots, by_rank=False)
