"""RazorAttention: heads that look tokens up keep all keys, the others the first and the newest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.masks import suffix_sums
from ...method import KeyBatch, LayerAttention, register
from ...method.blocks import row_blocks
from ...method.calibration import HeadPolicy


@register
class RazorAttention(HeadPolicy):
    """Keep all keys of retrieval heads; other heads keep the first ``sinks`` keys and the newest.

    *RazorAttention: Efficient KV Cache Compression Through Retrieval Heads*, ICLR 2025, arXiv 2407.15891.

    A text of random tokens is repeated. A head's *echo* score is the attention that tokens pay to earlier copies of
    themselves, its *induction* score that to the tokens behind these copies, mean over all pairs. Of the KV heads of all
    layers those with the best shares ``echo`` and ``induction`` of these scores are retrieval heads, the best query head of
    a group counting. ``mmaccel calibrate`` measures the scores on your model and writes them to a file.

    ``variant="official"``: as the authors' program ends its loop too early, echo heads count in the first layer alone that
    has some.

    Parameters
    ----------
    calibration : str, the file that ``mmaccel calibrate`` wrote; by default ``calibration.safetensors`` beside the model's
        weights.
    echo, induction : float, shares of all KV heads, 0.01 and 0.14 as in the paper.
    sinks : int, first keys that every head keeps. 4 as in the paper.
    recent, least : float and int, a fifth of the prompt, and 4000 keys at least, as in the paper.

    Paper and program: both add one key with the mean of the dropped keys and values, as often as these are many; keys here
    have no weights, so that it is left out. The prompt is cut when it ends; keys of the answer stay.
    """

    name = "razorattention"
    summary = "all keys for heads that look tokens up, as calibrated; sinks and the newest for the others"
    paper = "arXiv 2407.15891"
    uses = ("echo", "induction")
    limits = {"echo": "[0, 1]", "induction": "[0, 1]", "least": "[0, inf)"}

    calibration: str = ""
    echo: float = 0.01
    induction: float = 0.14
    least: int = 4000
    joint: bool = True
    sinks: int = 4
    recent: float = 0.2

    def score(self, keys: KeyBatch) -> Tensor:
        worth = self.kept_by(keys.layer, keys.keys.device)[None, :, None]
        newest = suffix_sums(keys.valid) <= self.least
        return worth.expand(keys.keys.shape[:3]).masked_fill(newest[:, None], 0.0)

    def full_heads(self) -> Mapping[int, Tensor]:
        echo, induction = (best(self.figures(name), getattr(self, name)) for name in self.uses)
        if self.official:
            first = next((layer for layer in sorted(echo) if echo[layer].any()), None)
            echo = {layer: heads & (layer == first) for layer, heads in echo.items()}
        return {layer: heads | induction[layer] for layer, heads in echo.items()}


def best(figures: Mapping[int, Tensor], share: float) -> dict[int, Tensor]:
    """Heads with the best ``share`` of the ``figures [Hkv]`` of all layers, equal ones all: ``[Hkv]`` bool by layer."""
    values = torch.cat(list(figures.values())).sort(descending=True).values
    count = round(len(values) * share)
    bar = values[count - 1] if count else torch.tensor(torch.inf)
    return {layer: x >= bar for layer, x in figures.items()}


def repetition_scores(attention: LayerAttention, period: int, begin: int = 0) -> tuple[Tensor, Tensor]:
    """Echo and induction scores of every query head, ``[Hq]`` float64 each, on one row of ``S`` tokens: ``begin`` tokens, then
    the same ``period`` of tokens again and again."""
    size, device = attention.key.shape[2], attention.query.device
    echo, induction = (torch.zeros(attention.query.shape[1], dtype=torch.float64, device=device) for _ in range(2))
    key = torch.arange(size, device=device)
    for start, stop in row_blocks(attention):
        row = torch.arange(start, stop, device=device)[:, None]
        # tokens in front of the first period have no copies
        copies = (key < row) & (key >= begin) & (row >= begin + period) & ((row - key) % period == 0)
        paid = attention.attention(start, stop)[0].double()
        echo += (paid * copies).sum((1, 2))
        induction += (paid[..., 1:] * copies[:, :-1]).sum((1, 2))
    return echo / size**2, induction / size**2
