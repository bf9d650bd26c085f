"""FasterVLM: keep the tokens that the CLS token attends to in the layer that is read."""

from torch import Tensor

from ..core.reduction import Reduction
from ..method import AttentionGuided, TokenBatch, register


@register
class FasterVLM(AttentionGuided):
    """Rank tokens by CLS attention in one layer of the vision tower.

    *[CLS] Attention is All You Need for Training-Free Visual Token Pruning: Make VLM Inference Faster*, the first version of
    arXiv 2412.01818.

    ``s_j = mean_h A[h, CLS, j]`` in the layer the language model reads; the ``count`` highest of every tile stay, in raster
    order. This is ``vtc-cls`` with one layer; ``vispruner`` is what the authors made of it later.

    Parameters
    ----------
    query, layer : ``query="all"`` ranks by the attention received from all tokens, for towers without a CLS token, which
        the paper does not treat; ``auto`` does so where there is none.

    Paper and program: the program is given a number of tokens for every tile, and all newline tokens of a stitched picture
    stay on top of these; here the budget counts all tokens, tiles share it by the number of their tokens, and newline tokens
    are dropped first.
    """

    name = "fastervlm"
    summary = "tokens the tower's CLS token attends to in the layer that is read"
    paper = "arXiv 2412.01818"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, ``count [N]`` -> the highest; tokens without a source are dropped first."""
        return Reduction.top(self.attention(tokens)[0], tokens.valid, count)
