"""GemFilter: a first pass through the early layers chooses the tokens that the model then reads."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ..method import LayerAttention, PreviewMethod, Ranking, register


@register
class GemFilter(Ranking, PreviewMethod):
    """Two passes: the last token's query in an early layer says what of the prompt is worth a second one.

    *Discovering the Gems in Early Layers: Accelerating Long-Context LLMs with 1000x Input Token Reduction*,
    arXiv 2409.17422.

    ``s_j = sum_h q_h . k_hj`` in layer ``layer`` for the last token of the prompt, behind RoPE, unscaled and without softmax,
    averaged along the prompt over ``kernel`` neighbours (places outside count as zero). The ``count`` visual tokens of each
    picture with the highest score stay, and all text. Then the model reads what is left from its first layer on.

    The first pass costs ``layer`` layers over the whole prompt, whatever is kept: of 28 layers with the default 11, so that no
    budget saves more than six tenths.

    Parameters
    ----------
    layer : the layer that looks; 13 of 32 as for Llama 3.1 8B. The program uses 19 of 40 for Mistral Nemo and 19 of 32 for
        Phi 3.5.
    kernel : odd width of the average; 5 as in the program.

    Paper and program: the method is for text, and ranks every token of the prompt, so that instructions stay only if their
    score is high; here visual tokens compete, each picture for its own budget, and text stays. The program numbers what is left
    anew, which is ``positions="paper"`` here.
    """

    name = "gemfilter"
    summary = "tokens that the last token's query matches in an early layer, in a first pass through the layers below"
    paper = "arXiv 2409.17422"
    ranks_by = "prompt_match"
    limits = {"kernel": "odd"}

    layer: float = 13 / 32
    kernel: int = 5

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``prompt_match [B, K]``; ``-inf`` for padding."""
        rows = attention.query.shape[2]
        match = attention.logits(rows - 1, rows)[:, :, 0].mean(1)
        hidden = match.isneginf()
        smooth = avg_pool1d(match.masked_fill(hidden, 0.0)[:, None], self.kernel, stride=1, padding=self.kernel // 2)
        return {"prompt_match": smooth[:, 0].masked_fill(hidden, -torch.inf)}
