"""Quest: pages of keys are read by an upper bound of what the query could find in them."""

import torch
from mmaccel_kernels.quest import Join, page_bounds
from torch import Tensor

from ...method import KeyUnits, ReadingPolicy, ReadStep, register


@register
class Quest(ReadingPolicy):
    """Every decode step reads the pages of visual keys that may hold the largest logits; all keys stay stored.

    *Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference*, ICML 2024, arXiv 2406.10774.

    Of every page the smallest and the largest key are kept channel by channel, ``m`` and ``M``: ``2 / page`` of the keys'
    memory. No key of the page has a larger product with the query than ``sum_d max(q_d m_d, q_d M_d)``. Pages of the
    largest bounds are read as a whole, as many as fit into the budget; the authors rank for every query head, here those of
    one KV head agree.

    Parameters
    ----------
    page : consecutive visual keys that are read together, as in the paper.
    least : pages that are read whatever the budget is, as in the program.
    layer : layers before this one read everything, as in the paper.
    reduce : how the query heads of a KV head agree on its pages: by the ``max`` of their bounds, or by the ``mean``.
    """

    name = "quest"
    summary = "every decode step reads the pages of visual keys with the largest bounds of their logits"
    paper = "arXiv 2406.10774"
    budget = "at_most"
    default_retain = 0.2
    limits = {"page": "[1, inf)", "least": "[1, inf)"}

    page: int = 16
    least: int = 3
    layer: float = 2
    reduce: Join = "max"

    @property
    def unit(self) -> int:
        return self.page

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``bounds [B, Hkv, P, 2 D]``: the largest and the smallest key of every page, channel by channel."""
        gone = ~units.there[..., None]
        low = units.keys.masked_fill(gone, torch.inf).amin(3)
        high = units.keys.masked_fill(gone, -torch.inf).amax(3)
        empty = gone.all(3)
        return {"bounds": torch.cat([high.masked_fill(empty, 0.0), low.masked_fill(empty, 0.0)], dim=-1)}

    def rate(self, step: ReadStep) -> Tensor:
        return page_bounds(step.query, step.summary["bounds"], self.reduce)

    def wanted(self, count: Tensor, there: Tensor) -> Tensor:
        """As many pages as fit into ``count`` keys, at least ``least``; all, the short last one too, where all keys do."""
        pages = (there + self.page - 1) // self.page
        fit = (count // self.page).clamp(min=self.least)
        return torch.where(count >= there, pages, torch.minimum(fit, pages))
