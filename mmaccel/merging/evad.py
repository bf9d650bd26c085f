"""EVAD: the key frame of a clip stays whole, the other frames keep the tokens that are attended to."""

from typing import Literal

import torch
from torch import Tensor

from ..core.reduction import Reduction, top_mask
from ..method import AttentionGuided, Grid, TokenBatch, register


@register
class Evad(AttentionGuided):
    """Every token of the middle frame, and of all others those that receive most attention in the vision tower.

    *Efficient Video Action Detection with Token Dropout and Context Refinement*, ICCV 2023, arXiv 2304.08451; its choice of
    tokens, which has no parameters.

    The key frame is ``t // 2`` of ``t``, and stays whole. Of the other frames together the tokens with the highest attention
    (mean over heads and queries) fill the budget, the lower slot on a tie. A budget below the key frame keeps the most attended
    tokens of it. An image is a key frame. Tokens without attention come last, and then newlines.

    Parameters
    ----------
    query, layer : whose attention counts, all tokens' as in the paper, and in which layer of the tower.

    Paper and program: the authors drop in three layers of a tower whose frames attend to each other, ``ceil(0.7 n)`` tokens
    each, and may count the queries of the key frame four times. The towers here encode frames one by one, where queries of
    the key frame see no other frame, so there is one choice, after the tower, and no such weight.

    ``variant="official"``: a ratio is rounded up.
    """

    name = "evad"
    summary = "the middle frame whole, and the attended tokens of the others"
    paper = "arXiv 2304.08451"
    unit = "picture"
    default_retain = 0.343

    query: Literal["auto", "cls", "all"] = "all"

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program rounds up."""
        return -int(-round(retain * size, 6) // 1)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, ``cells [N, n, 3]``, ``count [N]`` -> the key frame and what is attended to."""
        attention, _ = self.attention(tokens)
        key = tokens.celled & (tokens.cells[..., 0] == tokens.grid[:, :1].to(attention.device) // 2)
        count = count.to(attention.device)
        first = top_mask(attention, key, count)
        score = attention.masked_fill(first, torch.inf).nan_to_num(nan=-1.0, posinf=torch.inf)
        return Reduction.top(score.masked_fill(~tokens.celled, -torch.inf), tokens.valid, count)
