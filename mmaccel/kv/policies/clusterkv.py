"""ClusterKV: whole clusters of keys are read, those whose centroid the query matches best."""

import torch
from torch import Tensor

from ...core.masks import true_first
from ...method import KeyUnits, ReadingPolicy, ReadStep, register
from ...method.sparse_read import agree, by_kv_head
from .squeezed_attention import _members, _nearest


@register
class ClusterKV(ReadingPolicy):
    """Every decode step reads the visual keys of the best clusters; all keys stay stored.

    *ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression*, DAC 2025, arXiv 2412.03213.

    The visual keys of every KV head are clustered once a prompt has been read: by k-means, which starts from evenly spaced
    keys, and then each key goes to the centroid of largest cosine. A step reads clusters in falling order of ``q . c`` until
    the budget is met exactly; of the last cluster the first keys. The authors choose for every query head, here those of one
    KV head agree, and a key has the best of its ratings. Text is always read; where the 16 first keys that the program always
    reads may be visual, say so with ``sinks``.

    Parameters
    ----------
    clusters : for every KV head, a number or a share of its visual keys. A number of 400 in the program.
    iterations : of k-means.
    layer : layers before this one read everything. 2 as in the program.
    """

    name = "clusterkv"
    summary = "every decode step reads the clusters of visual keys whose centroids it matches best"
    paper = "arXiv 2412.03213"
    default_retain = 0.25
    limits = {"clusters": "[1, inf) or (0.0, 1.0]", "iterations": "[1, inf)"}

    layer: float = 2
    clusters: float = 0.02
    iterations: int = 10

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``labels [B, Hkv, P]`` int32, the cluster of every key, and ``centroids [B, Hkv, C, D]`` float32."""
        there = units.there[..., 0].expand(units.keys.shape[:3])
        keys = units.keys[:, :, :, 0].float().masked_fill(~there[..., None], 0.0)
        centroids, absent = self.centroids(keys, there)
        labels = _nearest(2 * keys, torch.nn.functional.normalize(centroids, dim=-1), absent)
        return {"labels": labels.int(), "centroids": centroids}

    def centroids(self, keys: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, C, D]``: the centroids of those of ``keys [B, Hkv, P, D]`` float32 that are ``there [B, Hkv, P]``; and
        ``[B, Hkv, C]`` bool, which of them are none. A row has as many as it has by itself."""
        size = there.sum(-1, keepdim=True)
        wanted = (
            self.clusters * size.double() if isinstance(self.clusters, float) else torch.full_like(size, self.clusters)
        )
        own = torch.minimum((wanted + 0.5).long().clamp(min=1), size.clamp(min=1))
        most = self.clusters if isinstance(self.clusters, int) else int(self.clusters * keys.shape[2] + 0.5)
        start = torch.arange(min(max(1, most), max(1, keys.shape[2])), device=keys.device)
        at = ((2 * start + 1) * size // (2 * own)).clamp(max=max(0, keys.shape[2] - 1))
        at = true_first(there).gather(2, at)
        centres, absent = keys.gather(2, at[..., None].expand(-1, -1, -1, keys.shape[3])), start >= own
        for _ in range(self.iterations):
            labels = _nearest(2 * keys, centres, absent).masked_fill(~there, len(start))
            sums, sizes = _members(keys, labels, len(start))
            centres = torch.where(sizes[..., None] > 0, sums / sizes[..., None], centres)
        return centres, absent

    def rate(self, step: ReadStep) -> Tensor:
        return by_centroid(step)


def by_centroid(step: ReadStep) -> Tensor:
    """``[B, Hkv, P]`` float32: the product of the query and the centroid of every key, by ``labels [B, Hkv, P]`` and
    ``centroids [B, Hkv, C, D]`` of the summary."""
    centroids, labels = step.summary["centroids"], step.summary["labels"].long()
    products = agree(by_kv_head(step.query.float(), labels.shape[1]) @ centroids.mT, "max")
    return products.gather(2, labels)
