"""TriForce: chunks of keys whose mean the first query behind the prompt finds are read in all decode steps."""

import torch
from torch import Tensor

from ...method import KeyUnits, Picked, ReadStep, register
from ...method.sparse_read import agree, best, by_kv_head
from .quest import Quest


@register
class TriForce(Quest):
    """Every decode step reads the same chunks of visual keys, those whose mean key answers the first query best.

    *TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding*, COLM 2024, arXiv
    2404.11912.

    Of every chunk the mean key is kept. Its product with the query behind the prompt rates the chunk; the first chunk is always
    read, and with it the best others within the budget. The choice stays until the next prompt. In the paper these keys are the
    cache of a draft that the whole cache verifies: ``lossless=True, draft="self"`` does so without a copy of the keys. The
    authors rate by the last query of the prompt and for every query head; here the query is that of the first decode step, and
    the heads of one KV head agree.

    Parameters
    ----------
    page : consecutive visual keys of a chunk, as in the program.
    least : chunks that are read whatever the budget is.
    layer : layers before this one read everything.
    reduce : how the query heads of a KV head agree on its chunks: by the ``max`` of their products, or by the ``mean``.
    """

    name = "triforce"
    summary = "all decode steps read the chunks of visual keys whose means the first query finds"
    paper = "arXiv 2404.11912"

    page: int = 8
    least: int = 1
    layer: float = 0

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``means [B, Hkv, P, D]`` float32: the mean key of every chunk."""
        there = units.there[..., None]
        sums = units.keys.float().masked_fill(~there, 0.0).sum(3)
        return {"means": sums / there.sum(3).clamp(min=1)}

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, Hkv, P]`` float32: products with the mean keys; the first chunk is rated highest."""
        means = step.summary["means"]
        products = by_kv_head(step.query.float(), means.shape[1]) @ means.mT
        ratings = agree(products, self.reduce)
        first = (~step.gone).long().cumsum(2) == 1
        return ratings.masked_fill(first & ~step.gone, torch.inf)

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """Choose in the first step, and keep the choice."""
        if step.carried:
            units, counts = step.carried["units"], step.carried["counts"]
            return Picked(units, counts), dict(step.carried)
        picked = best(self.rate(step), step)
        return picked, {"units": picked.units, "counts": picked.counts}
