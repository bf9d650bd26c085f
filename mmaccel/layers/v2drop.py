"""V2Drop: between layers, visual tokens that the layer before hardly changed are dropped."""

from torch import Tensor

from ..core.reduction import Reduction
from ..method import LayerAttention, LayerMethod, TokenBatch, register


@register
class V2Drop(LayerMethod):
    """One stage of variation-aware dropping.

    *V2Drop: Variation-aware Vision Token Dropping for Faster Large Vision-Language Models*, CVPR 2026.

    ``v_j = ||h_l - h_{l-1}||``, how much layer ``layer - 1`` changed token ``j``; the ``count`` highest stay, at their original
    positions. No attention is looked at. The recipe ``v2drop`` has three stages.

    ``variant="official"``: the number kept is rounded down.

    Parameters
    ----------
    layer : the input of this layer, 3.

    Paper and program: the program's ratios are shares of what a stage is given, those of recipes of all tokens; on Qwen2-VL it
    compares the first picture of a later prompt with a state of the one before.
    """

    name = "v2drop-step"
    summary = "tokens that the layer before changed most"
    paper = "CVPR 2026"
    official_rounding = "down"
    default_retain = 0.5

    layer: float = 3

    @property
    def compares_with(self) -> int | None:
        return int(self.layer) - 1

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``before [N, 1, n, D]``, ``count [N]`` -> the tokens that changed most."""
        change = (tokens.features.float() - tokens.signals["before"][:, 0]).norm(dim=-1)
        return Reduction.top(change, tokens.valid, count)
