"""FlexSelect: a first pass to a reference layer ranks the tokens of a clip by the attention that the question pays them."""

from torch import Tensor

from ..method import LayerAttention, PreviewMethod, Ranking, register
from ..method.blocks import question_peak


@register
class FlexSelect(Ranking, PreviewMethod):
    """The training-free ranking of FlexSelect: text-to-video attention in one reference layer, before anything is answered.

    *FlexSelect: Flexible Token Selection for Efficient Long Video Understanding*, arXiv 2506.00993.

    ``s_j = max_{h, t} A[h, t, j]`` over all heads and the tokens ``t`` of text behind the pictures, in layer ``layer`` of a
    first pass; the ``count`` highest of each picture or clip stay.

    The first pass costs ``layer`` layers over the whole prompt, whatever is kept: two thirds of them by default. It pays where
    the answer is better for it, or the same selection serves several questions; the authors' trained selector of half a billion
    parameters, which stands in for these layers, is not offered.

    ``variant="official"``: the number kept is rounded down.

    Parameters
    ----------
    layer : the reference layer: 19 of 28 as for LLaVA-Video 7B. The authors take 20 of 28 for Qwen2.5-VL 7B and 15 of 32 for
        InternVL2.5 8B.

    Paper and program: clips of more than 64 frames are cut into groups of every g-th frame there, each of which has a pass and
    a share of the budget, so that attention never sees more than 64 frames; here one pass sees them all. The program for LLaVA
    numbers what is left anew, which is ``positions="paper"`` here.
    """

    name = "flexselect"
    summary = "tokens that the question attends to in a reference layer, in a first pass through the layers below"
    paper = "arXiv 2506.00993"
    ranks_by = "text_peak"
    official_rounding = "down"

    layer: float = 19 / 28

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``text_peak [B, K]``: the largest attention paid by text behind the pictures, over heads too."""
        return {"text_peak": question_peak(attention)}
