"""SpecPC: the prompt is compressed to what a smaller model attends to, and to what stands beside it."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from ..core.budget import layer_at
from ..core.reduction import Reduction
from ..method import DraftMethod, LayerAttention, TokenBatch, register
from ..method.model_options import Loaded


@register
class SpecPC(DraftMethod):
    """The visual tokens that the last prompt tokens attend to in the draft, with their neighbours.

    *Draft-based Approximate Inference for LLMs* (SpecPC), arXiv 2506.08373.

    In layers ``layer`` and above of the draft the last ``window`` prompt tokens attend to the prompt, later ones counting more
    (weights rise evenly from 0 to 1), and so does each of the ``lookahead - 1`` tokens that the draft writes. Of rows, heads,
    layers and steps the largest counts, or with ``join="sum"`` their sum. Scores are pooled along the prompt over ``kernel``
    places. Then tokens are taken from the highest score down, each with the ``neighbours`` nearest to it, until the budget is
    full.

    Parameters
    ----------
    draft : folder or hub id of a smaller model of the same family, or the model, loaded; by default ``draft`` beside the
        model's weights.
    lookahead, window, kernel : 1, 64 and 64 as in the program.
    layer : the first layer of the draft that is looked at, a number or a share of its depth. 0 as in the program; the paper's
        configuration for Qwen2.5 has 8.
    pool : how neighbours are pooled, ``max`` or ``mean``.
    join : ``max``, or ``sum``, which the program calls mean.
    neighbours : how many tokens are taken with each, itself counted; -1 is the ``kernel``, 0 or 1 none but itself.
    weighted : whether later rows count more.

    Paper and program: the method is for text; every token competes, and the window stays. Here the tokens of each picture
    compete, and all text stays. The program numbers what is left anew, which is ``positions="paper"`` here.
    """

    name = "specpc"
    summary = (
        "tokens that the last prompt tokens attend to in a smaller model of the same family, with their neighbours"
    )
    paper = "arXiv 2506.08373"
    limits = {"window": "[1, inf)", "kernel": "[1, inf)", "layer": "[0, inf)", "neighbours": "[-1, inf)"}

    draft: str | Loaded = ""
    lookahead: int = 1
    window: int = 64
    kernel: int = 64
    layer: float = 0
    pool: Literal["max", "mean"] = "max"
    join: Literal["max", "sum"] = "max"
    neighbours: int = -1
    weighted: bool = True
    default_retain = 0.25

    @property
    def joined(self) -> Literal["max", "sum"]:  # type: ignore[override]
        return self.join

    @property
    def rows(self) -> int:
        return self.window

    def begin(self, depth: int) -> int:
        return min(layer_at(self.layer, depth), depth - 1)

    def see(self, attention: LayerAttention, prompt: int) -> Tensor:
        """``[B, prompt]``: of all rows and heads."""
        rows = attention.query.shape[2]
        paid = attention.attention(0, rows)[..., :prompt].nan_to_num(0.0)
        if self.weighted and attention.key.shape[2] == prompt:
            weight = torch.linspace(0, 1, self.window, device=paid.device) if self.window > 1 else paid.new_zeros(1)
            paid = paid * weight[-rows:, None]
        return paid.amax((1, 2)) if self.join == "max" else paid.sum((1, 2))

    def finalize(self, steps: Tensor, valid: Tensor) -> Tensor:
        left = (self.kernel - 1) // 2
        score = pad(self.over(steps, valid), (left, self.kernel - 1 - left))[:, None]
        return (max_pool1d if self.pool == "max" else avg_pool1d)(score, self.kernel, stride=1)[:, 0]

    def over(self, steps: Tensor, valid: Tensor) -> Tensor:
        """``[B, lookahead, S] -> [B, S]``: of all steps."""
        steps = steps * valid.to(steps)[..., None]
        return steps.amax(1) if self.join == "max" else steps.sum(1)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``draft_match [N, n]``, ``count [N]`` -> the highest, each with its neighbours."""
        score = tokens.signals["draft_match"].masked_fill(~tokens.valid, -torch.inf)
        n, each = score.shape[1], max(1, self.kernel if self.neighbours < 0 else self.neighbours)
        rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        slot, last = torch.arange(n, device=score.device), tokens.valid.sum(1, keepdim=True) - 1
        # a token comes where the first of those comes that take it along: nearer ones first, on a tie the one behind
        order = torch.full_like(rank, n * each)
        offsets = sorted(range(-((each - 1) // 2), each - (each - 1) // 2), key=lambda x: (abs(x), x))
        for number, offset in enumerate(offsets):
            taken = torch.minimum((slot + offset).clamp(min=0).expand_as(rank), last.clamp(min=0))
            comes = (rank * each + number).masked_fill(~tokens.valid, n * each)
            order = order.scatter_reduce(1, taken, comes, "amin")
        return Reduction.top(-order.to(torch.float64), tokens.valid, count)
