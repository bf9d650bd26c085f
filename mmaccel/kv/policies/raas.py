"""RaaS: keys that no query has attended to for longest leave."""

import torch
from torch import Tensor

from ...method import KeyBatch, LayerAttention, register
from ...method.blocks import row_blocks
from ..scoring.importance import by_group
from .h2o import H2O


@register
class RaaS(H2O):
    """Score keys by the newest query that paid them attention; the least recently used leave first.

    *Efficient Long-Decoding Inference with Reasoning-Aware Attention Sparsity* (RaaS), arXiv 2502.11147.

    A query that pays a key more than ``least`` stamps it with its own place; a key's own query stamps it when it comes. The
    score of a key is its stamp, that of a page the newest of its keys. For long answers with ``every``; keys of the prompt
    always stay then, as the paper says.

    Parameters
    ----------
    least : the attention from which a key is used, the most over the query heads of a key head.
    page : neighbouring places that stay or leave together, 16 in the paper; 1 for single keys.

    No program of the authors was at hand: the paper's threshold is on pages that a bound ranks, as in ``quest``.
    """

    name = "raas"
    summary = "keys that a query has attended to last; for long answers"
    paper = "arXiv 2502.11147"
    default_retain = 0.25
    needs_age = True
    limits = {"least": "[0, 1]", "page": "[1, inf)"}

    least: float = 1e-4
    page: int = 16

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        assert attention.places is not None
        heads, width = before.shape[1], attention.query.shape[2]
        stamps = (attention.places + 1).float()
        newest = before
        for start, stop in row_blocks(attention):
            paid = attention.attention(start, stop).nan_to_num(0.0)
            used = torch.where(paid > self.least, stamps[:, None, start:stop, None], 0.0).amax(2)
            newest = torch.maximum(newest, by_group(used, heads, "max"))
        own = torch.nn.functional.pad(stamps, (newest.shape[2] - width, 0))
        return torch.maximum(newest, own[:, None])

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.received is not None
        score = keys.received.masked_fill(~keys.valid[:, None], 0.0)
        if self.page > 1:
            page = (keys.index.clamp(min=0) // self.page)[:, None].expand(score.shape)
            begins = torch.nn.functional.pad(page[..., 1:] != page[..., :-1], (1, 0), value=True)
            run = begins.cumsum(-1) - 1
            best = torch.zeros_like(score).scatter_reduce(2, run, score, "amax")
            score = best.gather(2, run)
        if keys.answer is not None:
            prompt = keys.valid & (keys.index < keys.answer[:, None])
            score = score.masked_fill(prompt[:, None], torch.inf)
        return score.masked_fill(~keys.valid[:, None], -torch.inf)
