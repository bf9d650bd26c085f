"""SpecVLM: the tokens that hold most of the attention of a smaller model, and an even choice of the rest."""

from typing import Literal

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import DraftMethod, Grid, LayerAttention, TokenBatch, register
from ..method.model_options import Loaded


@register
class SpecVLM(DraftMethod):
    """The visual tokens that text attends to in the draft until they hold a share of its attention; the rest evenly.

    *SpecVLM: Enhancing Speculative Decoding of Video LLMs via Verifier-Guided Token Pruning*, EMNLP 2025, arXiv 2508.16201.

    The score of a token is the attention paid by the last ``window`` prompt tokens, the mean over them, all heads and layers.
    Of the ``count`` tokens that stay the first are those of the highest score: as few as hold the share ``part`` of the scores
    (``of="attention"``), or the share ``part`` of all tokens (``of="tokens"``). The others are taken at even distances from
    the tokens that are left.

    Parameters
    ----------
    draft : folder or hub id of a smaller model of the same family, or the model, loaded; by default ``draft`` beside the
        model's weights.
    lookahead : steps that are looked at, whose mean counts. 1 as in the program: the prompt alone.
    window : the last prompt tokens that are looked at. In the program they are all those behind the video.
    part, of : how many tokens the scores choose. 0.4 of the attention as in the program's examples.

    ``variant="official"``: the number kept is rounded down, and even distances are computed in float32.

    Paper and program: both prune the prompt of a drafting model, by the attention of the large one, so that drafts become
    cheaper and no answer changes. Here the draft's attention prunes the prompt of the large model, which changes answers.
    """

    name = "specvlm"
    summary = "tokens that hold a share of the attention that a smaller model of the same family pays, and an even rest"
    paper = "arXiv 2508.16201"
    joined = "sum"
    limits = {"window": "[1, inf)", "part": "[0, 1]"}

    draft: str | Loaded = ""
    lookahead: int = 1
    window: int = 64
    part: float = 0.4
    of: Literal["attention", "tokens"] = "attention"

    @property
    def rows(self) -> int:
        return self.window

    def see(self, attention: LayerAttention, prompt: int) -> Tensor:
        """``[B, prompt]``: the mean over heads and rows."""
        return attention.attention(0, attention.query.shape[2])[..., :prompt].nanmean((1, 2)).nan_to_num(0.0)

    def finalize(self, steps: Tensor, valid: Tensor) -> Tensor:
        weight = valid.to(steps)[..., None]
        return (steps * weight).sum(1) / weight.sum(1)

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program is given the share to drop, and rounds what stays down."""
        return int(size * (1 - (1 - retain)))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``draft_match [N, n]``, ``count [N]`` -> the highest scores and an even choice of the rest."""
        score, valid = tokens.signals["draft_match"].masked_fill(~tokens.valid, 0.0), tokens.valid
        count, size = count.to(score.device)[:, None], valid.sum(1, keepdim=True)
        order = score.masked_fill(~valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
        slot = torch.arange(score.shape[1], device=score.device).expand_as(score)
        if self.of == "attention":
            held = score.gather(1, order).cumsum(1)
            below = (held < score.sum(1, keepdim=True) * self.part) & (slot < size)
            first = 1 + below.sum(1, keepdim=True)
        else:
            first = (size.double() * self.part).long()
        first = torch.minimum(first, count)
        kept = torch.zeros_like(valid).scatter(1, order, slot < first) & valid
        left = valid & ~kept
        behind, rest = size - first - 1, count - first
        even = slot * behind.clamp(min=0) // (rest - 1).clamp(min=1)
        if self.official:
            for row, (last, many) in enumerate(zip(behind[:, 0].tolist(), rest[:, 0].tolist(), strict=True)):
                even[row, :many] = torch.linspace(0, max(last, 0), many, dtype=torch.long)
        # the places among those left of the tokens to take; behind the last one it is a place that none has
        wanted = torch.zeros(len(score), score.shape[1] + 1, dtype=torch.bool, device=score.device)
        wanted = wanted.scatter(1, even.where(slot < rest, score.shape[1]), True)
        place = (left.long().cumsum(1) - 1).clamp(min=0)
        return Reduction(kept | (left & wanted.gather(1, place)), valid)
