"""MPCache: pages of keys are read by a bound that is one product, without a choice between signs."""

from torch import Tensor

from ...method import KeyUnits, ReadStep, register
from ...method.sparse_read import agree, by_kv_head
from .quest import Quest


@register
class MPCache(Quest):
    """Every decode step reads the pages whose weighted extremes have the largest product with the query.

    *MPCache: MPC-Friendly KV Cache Eviction for Efficient Private LLM Inference*, NeurIPS 2025, arXiv 2501.06807.

    Quest's bound ``sum_d max(q_d m_d, q_d M_d)`` becomes ``q . (weight M + (1 - weight) m)``: a product with one vector a
    page, which needs no comparison, is half of the memory of both extremes, and is no bound any more. This is the paper's
    choice at every step. Its eviction before that is a policy such as ``snapkv``; that neighbouring layers share their choice
    is left out.

    Parameters
    ----------
    page : consecutive visual keys that are read together; 16 in the paper, within groups of 32.
    weight : of the largest keys; 0.6 as in the paper.
    least : pages that are read whatever the budget is.
    layer : layers before this one read everything.
    reduce : how the query heads of a KV head agree on its pages: by the ``max`` of their products, or by the ``mean``.
    """

    name = "mpcache"
    summary = "pages of visual keys by the product of the query and their weighted extremes"
    paper = "arXiv 2501.06807"
    limits = {"weight": "[0, 1]"}

    least: int = 1
    layer: float = 0
    weight: float = 0.6

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``means [B, Hkv, P, D]``: the weighted extremes of every page."""
        high, low = super().summarise(units)["bounds"].float().chunk(2, dim=-1)
        return {"means": (self.weight * high + (1 - self.weight) * low).to(units.keys.dtype)}

    def rate(self, step: ReadStep) -> Tensor:
        means = step.summary["means"].float()
        return agree(by_kv_head(step.query.float(), means.shape[1]) @ means.mT, self.reduce)
