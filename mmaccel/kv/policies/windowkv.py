"""WindowKV: keep whole windows of neighbouring keys that the last queries of the prompt attend to."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ...method import KeyBatch, Policy, register
from ..scoring.chunks import place_in_chunk
from .snapkv import window_attention


@register
class WindowKV(Policy):
    """Score windows of neighbouring keys by the attention paid by the prompt's last queries, for all heads together.

    *WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM Inference*, arXiv 2503.17922.

    The keys before the last queries are cut into windows ``w`` of ``width`` neighbours, of one picture or of text. Every key
    has the score of its window, ``s_w = mean_h m_h(w)``: of the attention ``mean_{q in last queries} A[h, q, k]`` the mean over
    the better half of the window (``max``) or over all of it (``average``). The last queries' own keys stay.

    Parameters
    ----------
    window : queries at the end of the prompt that score. 32 as in the program for ``max``; for ``average`` it has 16.
    width : keys per window; the last window of a picture or text may be shorter. 8 as in the program.
    strategy : ``max`` suits questions about one place of the prompt, ``average`` those that gather from all of it.
    layer_budget : ``pyramid:1.75``: in the program the last layers get 8/14 of the mean.

    Paper and program: in the program a trained classifier of the question chooses the strategy; here the recipe does. In the
    program the first of every 8 layers chooses for all of them, with equal budgets; here each layer chooses, and budgets fall
    from layer to layer. The program keeps the last queries in addition to the budget, and drops whole windows until it is met;
    here they are part of it where text has a budget, and it is met exactly: of the last window only the first keys stay. The
    program's windows may contain keys of a picture and of text.
    """

    name = "windowkv"
    summary = "windows of neighbouring keys the last prompt queries attend to, the same for all heads"
    paper = "arXiv 2503.17922"
    default_retain = 0.25
    shared = True
    steps_to_last = True
    limits = {"window": "[1, inf)", "width": "[1, inf)"}

    window: int = 32
    width: int = 8
    strategy: Literal["max", "average"] = "max"
    layer_budget: str = "pyramid:1.75"

    def score(self, keys: KeyBatch) -> Tensor:
        paid, own = window_attention(keys)
        number, place, most = keys.once(self._windows, own)
        slot = (number * self.width + place)[:, None].expand_as(paid)
        windows = paid.new_full((*paid.shape[:2], most * self.width), -torch.inf)
        windows = windows.scatter_(2, slot, paid).unflatten(2, (-1, self.width))
        best = windows.topk(max(1, self.width // 2) if self.strategy == "max" else self.width).values
        finite = best.isfinite()
        means = best.masked_fill(~finite, 0.0).sum(-1) / finite.sum(-1).clamp(min=1)
        score = means.mean(1).gather(1, number)
        score = score.masked_fill(own, torch.inf).masked_fill(~keys.valid, -torch.inf)
        return score[:, None].expand(keys.keys.shape[:3])

    def _windows(self, keys: KeyBatch, own: Tensor) -> tuple[Tensor, Tensor, int]:
        """``[B, K]`` long, the window of every key; ``[B, K]`` long, its place there; and the largest number of windows in a
        row. The keys ``own [B, K]`` of the last queries are in none of the scored windows."""
        place = place_in_chunk(replace(keys, valid=keys.valid & ~own), self.width)
        number = (place == 0).cumsum(1) - 1
        return number, place, int(number.max()) + 1
