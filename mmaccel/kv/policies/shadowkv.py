"""ShadowKV: chunks of keys are read whose mean key promises most attention, and those that their mean describes badly."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ...core.masks import ranks
from ...method import KeyUnits, ReadingPolicy, ReadStep, register
from ...method.sparse_read import agree, by_kv_head


@register
class ShadowKV(ReadingPolicy):
    """Every decode step reads the chunks of visual keys whose mean key gets most attention; all keys stay stored.

    *ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference*, ICML 2025, arXiv 2410.21465.

    A landmark is the mean of the keys of a chunk. Chunks with a key of small cosine to their landmark are outliers: they are
    read at every step and are no landmarks. A step takes the softmax of its products with the landmarks for every query head,
    of a KV head the largest, and reads the best chunks. The authors keep outliers and the newest chunks beside the budget, here
    they are within it; the newest are read with ``recent``, in their program four chunks and what does not fill one.

    With ``offload="host"`` landmarks are on the device, and the chosen keys and values are read from the host. The authors
    fetch values alone: their device keeps the keys before RoPE as a product of rank 160, from which it computes the chosen ones
    anew. Here keys are read as they are, which is exact and moves twice the bytes.

    ``variant="official"`` scales products by ``128 ** -0.5`` whatever the size of heads, as their program does; it counts,
    since heads are compared after the softmax.

    Parameters
    ----------
    page : consecutive visual keys that are read together, as in the paper.
    outliers : chunks that are always read, a number or a share of those that a step reads; 48 of 256 in the program.
    """

    name = "shadowkv"
    summary = "every decode step reads the chunks of visual keys whose mean key gets most attention, and outliers"
    paper = "arXiv 2410.21465"
    budget = "at_most"
    default_retain = 0.2
    limits = {"page": "[1, inf)", "outliers": "[0, inf) or [0.0, 1.0]"}

    page: int = 8
    outliers: float = 0.1875

    @property
    def unit(self) -> int:
        return self.page

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``landmarks [B, Hkv, P, D]``, and ``order [B, Hkv, P]`` int32: the place of a chunk among all by the smallest cosine
        of its keys to the landmark."""
        there = units.there.expand(units.keys.shape[:4])
        keys = units.keys.masked_fill(~there[..., None], 0.0)
        landmarks = keys.sum(3) / there.sum(3).clamp(min=1)[..., None]
        alike = cosine_similarity(keys.float(), landmarks.float()[:, :, :, None], dim=-1)
        least = alike.masked_fill(~there, torch.inf).amin(3)
        order = ranks(least.argsort(dim=-1, stable=True))
        return {"landmarks": landmarks.to(units.keys.dtype), "order": order.int()}

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, Hkv, P]`` float32: the share of a chunk in the attention to all landmarks, the largest of the query heads."""
        landmarks, count = step.summary["landmarks"], step.count * step.each
        number = count.clamp(max=self.outliers) if isinstance(self.outliers, int) else (count * self.outliers).long()
        odd = step.summary["order"] < number[..., None]
        scaling = 128**-0.5 if self.official else step.scaling
        query = by_kv_head(step.query.float(), landmarks.shape[1])
        logits = (query @ landmarks.float().mT) * scaling
        logits = logits.masked_fill((odd | step.gone)[:, :, None], torch.finfo(logits.dtype).min)
        # no share is as large as what an outlier has
        return agree(logits.softmax(-1), "max").masked_fill(odd, 2.0)

    def wanted(self, count: Tensor, there: Tensor) -> Tensor:
        """As many chunks as fit into ``count`` keys, at least one; all, the short last one too, where all keys do."""
        chunks = (there + self.page - 1) // self.page
        fit = (count // self.page).clamp(min=1)
        return torch.where(count >= there, chunks, torch.minimum(fit, chunks))
