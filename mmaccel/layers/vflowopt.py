"""VFlowOpt inside the language model: drop by the importance that tokens had in the vision tower."""

from torch import Tensor

from ..method import LayerAttention, LayerMethod, Ranking, Tap, register


@register
class VFlowOptInner(Ranking, LayerMethod):
    """The second and third stage of VFlowOpt.

    *VFlowOpt: A Token Pruning Framework for LMMs with Visual Information Flow-Guided Optimization*, ICCV 2025,
    arXiv 2508.05211.

    The ``count`` visual tokens of highest importance stay, at their original positions: the attention they received in the
    layer of the tower that the language model reads, mean over heads and queries. A recycled token has the importance of
    the token in whose place it stands. Nothing of the language model is looked at.

    ``variant="official"``: the number dropped is rounded half to even.

    Parameters
    ----------
    layer : the input of this layer. The authors drop at layers 9 and 18 of 28.

    Paper and program: see ``vflowopt-merge``, and the recipe ``vflowopt`` for all three stages.
    """

    name = "vflowopt-inner"
    summary = "tokens by attention received in the tower, from layer 9 on"
    paper = "arXiv 2508.05211"
    official_rounding = "dropped half even"
    ranks_by = "received_attention"

    layer: float = 9

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("received_attention"),)

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        return {}
