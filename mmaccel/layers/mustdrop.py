"""MustDrop, inside the language model: drop visual tokens that text attends to little, in sum and at most."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..core.reduction import Reduction, top_mask
from ..method import LayerAttention, LayerMethod, Method, ModelFacts, Tap, TokenBatch, register
from ..method.blocks import blocks_with, upto


@register
class MustDropFilter(LayerMethod):
    """The dual attention filter of the prefill stage.

    *Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model*, arXiv 2411.10803.

    ``A`` is the attention of layer ``layer - 1``, mean over heads, paid by text tokens ``t`` to the visual tokens ``j`` of a
    picture; ``g_j = sum_t A_tj`` and ``m_j = max_t A_tj``. Token ``j`` stays iff ``s_j = max(g_j / (global_threshold * sum_i
    g_i), m_j / individual_threshold) >= 1``, that is, unless both are below their thresholds.

    By default the budget decides: the ``count`` highest ``s_j`` stay, the same filter with both thresholds scaled until the
    budget is met. With ``adaptive=True`` the thresholds decide, as in the paper, and the budget is an upper limit
    (``retain=1.0``: none); at least one token of a picture stays. Text always stays.

    With ``protect`` above 0, the ``ceil(protect n)`` tokens with most CLS attention in the last layer of the tower, of the
    ``n`` tokens of a picture that entered the language model, are key tokens: no threshold drops them, and a budget drops
    them last. Sums are computed over blocks of text rows; no map is kept.

    Parameters
    ----------
    layer : the input of this layer. The authors filter after layers 2, 6, 10 and 14 of 32, on the map of that layer:
        3, 7, 11 and 15 here; see the recipe ``mustdrop``.
    global_threshold, individual_threshold : 0.001 and 0.001 as for 192 of 576 tokens on TextVQA; 0.0012 and 0.001 for
        128, 0.011 and 0.01 for 64.
    adaptive : the thresholds decide what stays, and not the budget.
    protect : share of key tokens; 0.08 in the recipe ``mustdrop``, as in the program, and 0 in this method alone.
    query : whose attention makes key tokens: ``cls``; ``all``, the mean over all patches, for towers without a CLS token;
        ``auto``, the CLS token's where there is one.

    Paper and program: the program sums over the text after the image; text before it cannot attend to it, so here all text
    is summed over, and with several pictures each has its own sum. Its key tokens are chosen among tokens that its vision
    stage merged inside the tower; here a merged token has the CLS attention of the patch in whose slot it is. It renumbers
    positions, which stay original here, and after prefill drops from the cache of the layers before a filter what later
    filters dropped; here those layers keep all they have stored (but see the policy ``mustdrop-cache``).
    """

    name = "mustdrop-filter"
    summary = "visual tokens that the text, or a single text token, attends to"
    paper = "arXiv 2411.10803"
    budget = "at_most"
    renumbers_inside = True
    default_retain = 1 / 3
    limits = {"global_threshold": "(0, inf)", "individual_threshold": "(0, inf)", "protect": "[0, 1]"}

    layer: float = 3
    global_threshold: float = 0.001
    individual_threshold: float = 0.001
    adaptive: bool = False
    protect: float = 0.0
    query: Literal["auto", "cls", "all"] = "auto"

    def fit(self, family: ModelFacts) -> Method:
        if self.query == "auto":
            return replace(self, query="cls" if family.has_cls else "all").fit(family)
        return super().fit(family)

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("received_attention" if self.query == "all" else "cls_attention", (-1,)),) if self.protect else ()

    def check(self, family: ModelFacts) -> None:
        if self.protect and self.query == "cls":
            self.require_cls(family, "give query='all'")

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``text_sum`` and ``text_max [B, K]``: sum and maximum over text rows of the attention they pay, mean over heads."""
        text = attention.text
        total = torch.zeros(len(text), attention.key.shape[2], device=attention.query.device)
        most = torch.zeros_like(total)
        for start, stop in blocks_with(attention, attention.host_text.any(0)):
            paid = upto(attention, stop).attention(start, stop).mean(1).masked_fill(~text[:, start:stop, None], 0.0)
            seen = paid.shape[2]
            total[:, :seen] += paid.sum(1)
            most[:, :seen] = torch.maximum(most[:, :seen], paid.amax(1))
        return {"text_sum": total, "text_max": most}

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``text_sum``, ``text_max [N, n]``, ``count [N]`` -> the highest ``s``, those of at least 1 if adaptive."""
        valid = tokens.valid
        total = tokens.signals["text_sum"].masked_fill(~valid, 0.0)
        most = tokens.signals["text_max"].masked_fill(~valid, 0.0)
        bar = self.global_threshold * total.sum(1, keepdim=True)
        score = torch.maximum(total / bar.clamp(min=torch.finfo(bar.dtype).tiny), most / self.individual_threshold)
        count = count.to(valid.device)
        keys = self.keys(tokens, count)
        if self.adaptive:
            passed = valid & ((total >= bar) | (most >= self.individual_threshold) | keys)
            count = torch.minimum(count, passed.sum(1).clamp(min=1))
            # rounding must not put the quotient on the wrong side of 1
            score = torch.where(passed, score.clamp(min=1.0), score.clamp(max=1.0 - 1e-6))
        return Reduction(top_mask(score.masked_fill(keys, torch.inf), valid, count), valid)

    def keys(self, tokens: TokenBatch, count: Tensor) -> Tensor:
        """``[N, n]`` bool: the key tokens of every picture, at most ``count [N]``.

        Earlier filters drop none of them, so the best of the tokens left are the best of those that entered.
        """
        if not self.protect:
            return torch.zeros_like(tokens.valid)
        seen = tokens.signals[self.taps()[0].kind][:, 0]
        most = (tokens.entered.to(count.device) * self.protect).ceil().long()
        return top_mask(seen, tokens.valid & ~seen.isnan(), torch.minimum(most, count))
