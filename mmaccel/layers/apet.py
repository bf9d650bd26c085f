"""ApET, inside the language model: hidden states that others cannot reconstruct stay, and the rest merge into them."""

from torch import Tensor

from ..core.reduction import Reduction
from ..method import LayerAttention, LayerMethod, TokenBatch, register
from ..method.reconstruction import BasisSlots, merged_by_error


@register
class ApETStep(LayerMethod):
    """Merging by approximation error of hidden states, see ``apet-merge``.

    *ApET: Approximation-Error Guided Token Compression for Efficient VLMs*, CVPR 2026.

    The same rule at the input of a layer; with ``basis_slots`` the basis comes in the order of errors. The recipe ``apet`` has
    both stages.

    ``variant="official"``: ``basis_slots="overwrite"`` where it is ``none``, and the number kept is rounded down.

    Parameters
    ----------
    layer : the input of this layer, 16.
    basis, ridge, start, basis_slots : see ``apet-merge``.

    Paper and program: the program renumbers positions, which stay original here; that for Qwen does not call this stage.
    """

    name = "apet-step"
    summary = "hidden states that others cannot reconstruct, the rest merged into the nearest of them"
    paper = "CVPR 2026"
    official_rounding = "down"
    renumbers_inside = True
    default_retain = 1 / 3
    limits = {"basis": "[1, inf)", "ridge": "(0, inf)", "start": "[0, inf)"}

    layer: float = 16
    basis: int = 10
    ridge: float = 1e-5
    start: int = 0
    basis_slots: BasisSlots = "none"

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> kept tokens, and links of the others."""
        slots: BasisSlots = "overwrite" if self.official and self.basis_slots == "none" else self.basis_slots
        return merged_by_error(tokens, count, self.basis, self.ridge, self.start, slots, by_rank=True)
