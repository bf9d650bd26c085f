"""Speculative Prefill: a smaller model says which part of the prompt the large one reads."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ..core.reduction import Reduction
from ..method import DraftMethod, Grid, LayerAttention, TokenBatch, register
from ..method.model_options import Loaded


@register
class SpecPrefill(DraftMethod):
    """The visual tokens that the draft attends to while it begins to answer.

    *Speculative Prefill: Turbocharging TTFT with Lightweight and Training-Free Token Importance Estimation*, arXiv 2502.02789.

    In every layer and head of the draft the last prompt token, and each of the ``lookahead - 1`` tokens that the draft writes
    behind it, attend to the prompt alone (a softmax over its keys); the attention is averaged along the prompt over ``kernel``
    neighbours (places outside count as zero). Of layers and heads the largest counts, of steps the mean; steps behind an end
    token are left out. Runs of ``chunk`` consecutive visual tokens stay together, those of the highest mean first; of the last
    run as many as the budget leaves, the highest first.

    Parameters
    ----------
    draft : folder or hub id of a smaller model of the same family, or the model, loaded; by default ``draft`` beside the
        model's weights.
    lookahead : steps that are looked at; 8 as in the program's class, whose configurations have 1, 4 and 8.
    kernel : odd width of the average, 13 as in the program's "full" configurations; 0 for none.
    run : tokens of a run, 32 as in the program; 0 for single tokens.

    ``variant="official"``: whole runs stay, as many as the share of all of them rounded up.

    Paper and program: the method is for text, and every token of the prompt competes; here those of each picture do, and text
    stays. Kept tokens keep their positions, as in the program.
    """

    name = "specprefill"
    summary = "tokens that a smaller model of the same family attends to while it begins to answer"
    paper = "arXiv 2502.02789"
    limits = {"kernel": "odd or 0", "run": "[0, inf)"}

    draft: str | Loaded = ""
    lookahead: int = 8
    kernel: int = 13
    run: int = 32

    def see(self, attention: LayerAttention, prompt: int) -> Tensor:
        """``[B, prompt]``: the last row, with nothing but the prompt to attend to."""
        visible = None if attention.visible is None else attention.visible[..., :prompt]
        alone = replace(attention, key=attention.key[:, :, :prompt], visible=visible, memo={})
        rows = alone.query.shape[2]
        paid = alone.attention(rows - 1, rows)[:, :, 0].nan_to_num(0.0)
        if self.kernel:
            paid = avg_pool1d(paid, self.kernel, stride=1, padding=self.kernel // 2)
        return paid.amax(1)

    def finalize(self, steps: Tensor, valid: Tensor) -> Tensor:
        weight = valid.to(steps)[..., None]
        return (steps * weight).sum(1) / weight.sum(1)

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Whole runs, rounded up."""
        each = self.run or 1
        return min(size, math.ceil(round(math.ceil(size / each) * retain, 9)) * each)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``draft_match [N, n]``, ``count [N]`` -> the runs of the highest mean."""
        score = tokens.signals["draft_match"].masked_fill(~tokens.valid, -torch.inf)
        order = score.argsort(dim=1, descending=True, stable=True)
        if self.run:
            run = torch.arange(score.shape[1], device=score.device).div(self.run, rounding_mode="floor")
            run = run.expand_as(score)
            shape = (len(score), int(score.shape[1] // self.run + 1))
            size = score.new_zeros(shape).scatter_add(1, run, tokens.valid.to(score))
            mean = score.new_zeros(shape).scatter_add(1, run, score.masked_fill(~tokens.valid, 0.0)) / size.clamp(min=1)
            mean = mean.masked_fill(size == 0, -torch.inf)
            rank = mean.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            place = rank.gather(1, run).masked_fill(~tokens.valid, shape[1])
            order = order.gather(1, place.gather(1, order).argsort(dim=1, stable=True))
        kept = torch.zeros_like(tokens.valid)
        first = torch.arange(score.shape[1], device=score.device) < count.to(score.device)[:, None]
        return Reduction(kept.scatter(1, order, first) & tokens.valid, tokens.valid)
