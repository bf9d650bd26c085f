"""PromptDistill: deep in the language model keep the tokens that the last prompt token's query matches, by logits."""

from torch import Tensor
from torch.nn.functional import avg_pool1d

from ..method import LayerAttention, LayerMethod, Ranking, register


@register
class PromptDistill(Ranking, LayerMethod):
    """Rank visual tokens by the scaled products of the last prompt token's query with their keys, before any softmax.

    *PromptDistill: Query-based Selective Token Retention in Intermediate Layers for Efficient Large Language Model
    Inference*, arXiv 2503.23274.

    ``s_j = mean_h q_h . k_hj * scaling`` in layer ``layer - 1``. With ``pooling`` the scores are averaged along the
    sequence over ``kernel`` neighbours, including text; places outside the prompt, padding, and the last prompt token itself
    count as zero. The ``count`` highest of each picture stay, at their original positions, and all text.

    Parameters
    ----------
    layer : the input of this layer. The program selects after its layer 13 (of 32), by the queries and keys of that
        layer; that is 14 here. Its multi-stage form is a recipe with stages at several layers.
    pooling, kernel : on and 5 as in the program.

    Paper and program: the method is for text models and ranks every token of the prompt, keeping an absolute number of
    them (1,024; 100 in its library) and all tokens after the prompt; here visual tokens compete, each picture for its
    own budget, and text stays. Its option to also truncate the cache of the layers before the selection
    (``cache_truncation_end``; off by default, on in its scripts) is not offered here. In a layer with a sliding window only
    the logits inside the window are ranked.
    """

    name = "promptdistill"
    summary = "tokens the last prompt token's query matches, from layer 14 on"
    paper = "arXiv 2503.23274"
    ranks_by = "prompt_logits"
    default_retain = 0.25
    limits = {"kernel": "odd"}

    layer: float = 14
    pooling: bool = True
    kernel: int = 5

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``prompt_logits [B, K]``, mean over heads; ``-inf`` for keys that the last token may not attend to."""
        rows = attention.query.shape[2]
        logits = attention.logits(rows - 1, rows)[:, :, 0].mean(1)
        if not self.pooling:
            return {"prompt_logits": logits}
        hidden = logits.isneginf()
        logits = logits.masked_fill(hidden, 0.0)
        logits[:, -1] = 0.0
        smooth = avg_pool1d(logits[:, None], self.kernel, stride=1, padding=self.kernel // 2)[:, 0]
        return {"prompt_logits": smooth.masked_fill(hidden, float("-inf"))}
