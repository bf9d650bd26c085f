"""PriorTR: tokens that the question attends to more than a token that has not read it."""

from typing import Literal

import torch
from torch import Tensor

from ..core.masks import question
from ..core.reduction import Reduction
from ..method import LayerAttention, LayerMethod, TokenBatch, register
from ..method.blocks import blocks_with, upto

_LEAST = 1e-10


@register
class PriorTR(LayerMethod):
    """Rank visual tokens by the attention of the question, corrected by a prior.

    *PriorTR*, ECCV 2026.

    ``P`` is the attention that text behind the pictures pays to the tokens of a picture in layer ``layer - 1``, mean over
    these tokens and over heads, and ``Q`` that of the first token behind the picture, which has not read the question. Both
    sum to one over the picture; the ``count`` tokens of highest ``P log(P / Q)`` stay, at their original positions.

    ``variant="official"``: the number kept is rounded down.

    Parameters
    ----------
    layer : the input of this layer, 3.
    query : ``question``, all text behind the last picture; ``last``, its last token.
    skip_last : leave the last token out of the question, as the programs for Qwen do.
    heads : ``mean`` or ``max`` over heads.
    null : which token behind a picture ``Q`` is from, 0 for the next one; the program takes the second (1) for InternVL.

    Paper and program: below ``Q`` the score falls and rises again as ``P`` goes to zero, so of a large budget some go to the
    least attended tokens, in the paper and here. The program takes one picture; here each has a ``Q`` of its own, and one
    that ends the prompt none. The program can also keep what is above a threshold, and take ``Q`` from a second run without
    the question.
    """

    name = "priortr"
    summary = "tokens that the question attends to more than a token before it does"
    paper = "ECCV 2026"
    official_rounding = "down"
    default_retain = 1 / 3
    limits = {"null": "[0, inf)"}

    layer: float = 3
    query: Literal["question", "last"] = "question"
    skip_last: bool = False
    heads: Literal["mean", "max"] = "mean"
    null: int = 0

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``question`` and ``prior [B, K]``: the attention of the question, and of a token before it."""
        asked, host = (question(text, ~text) for text in (attention.text, attention.host_text))
        last = asked.clone()
        last[:, :-1] = False
        if self.query == "last":
            asked = last
        elif self.skip_last:
            asked = torch.where((asked & ~last).any(1, keepdim=True), asked & ~last, asked)
        keys, rows = attention.key.shape[2], attention.query.shape[2]
        _, own = self._nulls(attention.text)
        batch, count = attention.query.shape[:2]
        total = torch.zeros(batch, count, keys, device=attention.query.device)
        prior = torch.zeros_like(total)
        for start, stop in blocks_with(attention, (host | self._nulls(attention.host_text)[0]).any(0)):
            paid = upto(attention, stop).attention(start, stop)
            total[..., : paid.shape[3]] += paid.masked_fill(~asked[:, None, start:stop, None], 0.0).sum(2)
            # the keys of the prompt, each of which comes before the row that its prior is from
            mine = slice(keys - rows, keys - rows + stop)
            row = (own[:, None, :stop] - start).expand(-1, count, -1)
            value = paid[..., mine].gather(2, row.clamp(0, stop - start - 1)[:, :, None])[:, :, 0]
            prior[..., mine] = torch.where((row >= 0) & (row < stop - start), value, prior[..., mine])
        both = {"question": total / asked.sum(1).clamp(min=1)[:, None, None], "prior": prior}
        return {name: x.mean(1) if self.heads == "mean" else x.amax(1) for name, x in both.items()}

    def _nulls(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, q]`` bool: the rows that ``Q`` is from, for ``text [B, q]`` bool; and ``[B, q]`` long, that of each token, -1
        for text and what no text follows."""
        length = text.shape[1]
        place = torch.arange(length, device=text.device).expand_as(text)
        following = torch.where(text, place, length).flip(1).cummin(1).values.flip(1)
        none = text | (following == length)
        own = (following + self.null).clamp(max=length - 1).masked_fill(none, length)
        rows = torch.zeros_like(text[:, :1]).repeat(1, length + 1).scatter_(1, own, True)[:, :-1]
        return rows, own.masked_fill(none, -1)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``question``, ``prior [N, n]``, ``count [N]`` -> the tokens of highest score."""
        p, q = (tokens.signals[name].masked_fill(~tokens.valid, 0.0) for name in ("question", "prior"))
        p, q = (x / (x.sum(1, keepdim=True) + _LEAST) for x in (p, q))
        return Reduction.top(p * ((p + _LEAST) / (q + _LEAST)).log(), tokens.valid, count)
