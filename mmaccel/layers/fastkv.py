"""FastKV: half-way through the language model keep the visual tokens that the end of the prompt attends to."""

from torch import Tensor
from torch.nn.functional import avg_pool1d

from ..method import LayerAttention, LayerMethod, Ranking, register


@register
class FastKVTokens(Ranking, LayerMethod):
    """Token-selective propagation: rank visual tokens by the attention of the last queries of one layer, smoothed.

    *FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding Acceleration*, arXiv 2502.01068.

    ``s_j = sum_h pool( sum_{q in window} A_{l-1}[h, q, j] )``; the ``count`` highest of each picture stay, at their
    original positions, and all text does. The layers below ``layer`` keep all keys; the paper compresses these with SnapKV of
    the same window, as the recipe ``fastkv`` does.

    Parameters
    ----------
    layer : the input of this layer. The paper selects by its layer 15 of 32, so 16.
    window : number of queries at the end of the prompt that score; 8 as in the program.
    kernel : odd width of the pooling; 7 as in the program.

    Paper and program: in the program every token of a text prompt competes, except those of the window; here text stays and
    visual tokens compete, each picture for its own budget.
    """

    name = "fastkv-tokens"
    summary = "tokens the last prompt queries attend to, from the middle of the language model on"
    paper = "arXiv 2502.01068"
    ranks_by = "window_attention"
    default_retain = 0.2
    limits = {"window": "[1, inf)", "kernel": "odd"}

    layer: float = 16
    window: int = 8
    kernel: int = 7

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``window_attention [B, K]``: sums over window and heads; the window's own keys count as zero."""
        rows = attention.query.shape[2]
        first = max(0, rows - self.window)
        # queries of padding attend to nothing
        paid = attention.attention(first, rows).nan_to_num(0.0)
        score = paid.sum((1, 2))
        score[:, first - rows :] = 0.0
        return {"window_attention": avg_pool1d(score[:, None], self.kernel, stride=1, padding=self.kernel // 2)[:, 0]}
