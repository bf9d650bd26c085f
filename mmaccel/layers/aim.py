"""AIM, inside the language model: visual tokens are ranked by PageRank on a layer's attention."""

import torch
from torch import Tensor

from ..method import LayerAttention, LayerMethod, Ranking, register
from ..method.blocks import row_blocks, upto


@register
class AimPageRank(Ranking, LayerMethod):
    """Keep the visual tokens in which a random walk along attention ends, from wherever it starts.

    *AIM: Adaptive Inference of Multi-Modal LLMs via Token Merging and Pruning*, ICCV 2025, arXiv 2412.03248.

    ``M = softmax(logits / tau)`` per head over the whole prompt, ``p = 1 / L``, then ``iterations`` times ``p <- p M``;
    a token's importance is ``sqrt(mean_h p_h^2)``. At the input of layer ``layer`` the ``count`` most
    important visual tokens stay, at their original positions. Text takes part in the walk and always stays.

    Attention is causal, so ``p <- p M`` moves weight to earlier tokens only: once all rows after row ``r`` are processed,
    the weight that reaches ``r`` is known for every iteration. Each block of rows of ``M`` is therefore computed once, from
    the last to the first, for all iterations; nothing larger than a block and ``[iterations + 1, B, H, K]`` is in memory.

    ``variant="official"``: a ratio is rounded down.

    Parameters
    ----------
    layer : the input of this layer, counted from 0. The recipe ``aim`` merges to ``retain`` of the tokens (25 %), and has a
        stage at each of layers 15 to 22 of 28, which keep 7, 6, ... 1 eighths of that and finally one token per picture.
    tau, iterations : temperature and steps of the walk; 0.1 and 5 as in the program.
    teleport : share of the weight that restarts uniformly in each iteration, ``p <- (1 - teleport) p M + teleport / L``; 0 as
        in the program, which has the term but does not use it.

    Paper and program: after each layer ``l >= 14`` of 28 the program keeps ``max(0, 1 - (l - 13) / 8)`` of the tokens that
    entered the language model, none after layer 21; here one per picture stays. It only masks dropped tokens and takes one
    image; here tokens are removed, every picture has its own budget, and keys of earlier turns receive weight but pass none on.
    """

    name = "aim-pagerank"
    summary = "visual tokens that a page rank walk over a layer's attention ends at"
    paper = "arXiv 2412.03248"
    ranks_by = "importance"
    official_rounding = "down"
    default_retain = 0.25
    limits = {"tau": "(0, inf)", "iterations": "[1, inf)", "teleport": "[0, 1)"}

    layer: float = 15
    tau: float = 0.1
    iterations: int = 5
    teleport: float = 0.0

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``importance [B, K]``; 0 for padding."""
        batch, heads, rows, _ = attention.query.shape
        keys = attention.key.shape[2]
        before = keys - rows
        walk = attention.query.new_zeros(self.iterations + 1, batch, heads, keys, dtype=torch.float32)
        length = walk.new_zeros(batch)
        for start, stop in reversed(row_blocks(attention)):
            # padding attends to nothing, and passes no weight on
            flow = upto(attention, stop).logits(start, stop).div_(self.tau).softmax(-1).nan_to_num(0.0)
            real = flow[:, 0].sum(-1) > 0
            length += real.sum(1)
            here = slice(before + start, before + stop)
            walk[0, :, :, here] = real[:, None].float()
            walk[1:, :, :, here] += self.teleport * real[:, None]
            for i in range(self.iterations):
                on = (1 - self.teleport) * walk[i, :, :, here]
                walk[i + 1, :, :, : before + stop] += torch.einsum("bhr,bhrk->bhk", on, flow)
        importance = walk[-1].square().mean(1).sqrt()
        return {"importance": importance / length.clamp(min=1)[:, None]}
