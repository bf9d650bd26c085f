"""Squeezed Attention: keys are read whose cluster's centroid promises enough attention."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.masks import true_first
from ...method import KeyUnits, Observed, ReadingPolicy, ReadStep, register
from ...method.sparse_read import Picked, agree, best, by_kv_head

#: entries of the similarities of keys and centroids that are made at once
CHUNK = 1 << 24
#: estimates that differ by so small a share are equal
TIE = 1e-5


@register
class SqueezedAttention(ReadingPolicy):
    """Every decode step reads the visual keys whose cluster is estimated above a threshold; all keys stay stored.

    *Squeezed Attention: Accelerating Long Context Length LLM Inference*, ACL 2025, arXiv 2411.09688.

    The visual keys of every KV head are clustered by cosine once a prompt has been read. A key's attention is estimated as that
    of its cluster's mean key, ``exp(q . c) / sum_j N_j exp(q . c_j)``. Keys above one threshold are read, which is the same for
    all layers and heads: that of which the estimates for the last queries of the prompt, averaged over these, exceed the
    share ``retain``. So layers, heads and steps read more or less than that, and more of packed pages, which are read as a
    whole. The authors cluster a fixed context beforehand; a video that is asked about in several turns is one.

    Parameters
    ----------
    clusters : for every KV head, a number or a share of its visual keys. A twentieth, as in the paper.
    iterations : of k-means, which starts from evenly spaced keys.
    window : queries at the end of the prompt that set the threshold, as in the program.
    ceiling : at most so many times the budget is read in one step, the best; what is beyond is not waited for.
    reduce : how the query heads of a KV head agree on its keys: by the ``max`` of their estimates, or by the ``mean``.
    """

    name = "squeezed-attention"
    summary = "every decode step reads the visual keys whose cluster promises attention above one threshold (adaptive)"
    paper = "arXiv 2411.09688"
    #: one level parts the clusters of all heads
    mixes_heads = True
    partial = True
    budget = "adaptive"
    default_retain = 0.2
    limits = {
        "clusters": "[1, inf) or (0.0, 1.0]",
        "iterations": "[1, inf)",
        "window": "[1, inf)",
        "ceiling": "[1, inf)",
        "reduce": ("max", "mean"),
    }

    clusters: float = 0.05
    iterations: int = 10
    window: int = 100
    ceiling: float = 2.0
    reduce: str = "max"

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``labels [B, Hkv, P]`` int32, the cluster of every key; ``centroids [B, Hkv, C, D]``, their mean keys; and
        ``weights [B, Hkv, C]`` float32, the logarithms of their sizes."""
        there = units.there[..., 0].expand(units.keys.shape[:3])
        keys = units.keys[:, :, :, 0].masked_fill(~there[..., None], 0.0)
        labels = self.cluster(keys, there)
        number = self.number(keys.shape[2])
        sums, sizes = _members(keys, labels, number)
        centroids = (sums / sizes.clamp(min=1)[..., None]).to(keys.dtype)
        return {"labels": labels.clamp(max=number - 1).int(), "centroids": centroids, "weights": sizes.log()}

    def number(self, keys: int) -> int:
        """Number of clusters of a number of keys."""
        wanted = self.clusters if isinstance(self.clusters, int) else int(self.clusters * keys + 0.5)
        return min(max(1, wanted), keys)

    def cluster(self, keys: Tensor, there: Tensor) -> Tensor:
        """The cluster of those of ``keys [B, Hkv, P, D]`` that are ``there``; ``C``, which is no cluster, of the others: ``[B,
        Hkv, P]`` long. A row has as many clusters as it has by itself."""
        size, most = there.sum(-1), self.number(keys.shape[2])
        own = torch.full_like(size, int(self.clusters)) if isinstance(self.clusters, int) else None
        own = (self.clusters * size.double() + 0.5).long() if own is None else own
        own = torch.minimum(own.clamp(min=1, max=most), size)
        start = torch.arange(most, device=keys.device)
        absent = start >= own[..., None]
        at = (2 * start + 1) * size[..., None] // (2 * own[..., None].clamp(min=1))
        at = true_first(there).gather(2, at.clamp(max=keys.shape[2] - 1))
        at = at[..., None].expand(-1, -1, -1, keys.shape[3])
        directions = torch.nn.functional.normalize(keys.float(), dim=-1)
        doubled, gone = 2 * directions, ~there
        centres = directions.gather(2, at)
        for _ in range(self.iterations):
            labels = _nearest(doubled, centres, absent).masked_fill_(gone, most)
            sums, sizes = _members(directions, labels, most)
            centres = torch.where(sizes[..., None] > 0, sums / sizes[..., None], centres)
        return _nearest(doubled, centres, absent).masked_fill_(gone, most)

    # --- the threshold --------------------------------------------------------------------------------------------
    def estimate(self, queries: Tensor, summary: Mapping[str, Tensor], scaling: float) -> Tensor:
        """The attention of ``queries [B, Hq, W, D]`` to one key of every cluster, ``[B, Hkv, W, C]`` float32."""
        centroids, weights = summary["centroids"], summary["weights"]
        heads = centroids.shape[1]
        grouped = by_kv_head(queries.float(), heads).flatten(2, 3)
        logits = (grouped @ centroids.float().mT).unflatten(2, (-1, queries.shape[2])) * scaling
        total = (logits + weights[:, :, None, None]).logsumexp(-1, keepdim=True)
        return agree((logits - total).exp().flatten(3), self.reduce).unflatten(2, (queries.shape[2], -1))

    def level(self, layers: Sequence[Observed], share: Tensor) -> Tensor:
        """The estimate that the ``share [B]`` of all keys of all layers and heads exceed, ``[B]`` float32."""
        figures = []
        for layer in layers:
            estimates = self.estimate(layer.queries, layer.summary, layer.scaling)
            seen = layer.seen[:, None, :, None]
            mean = estimates.masked_fill(~seen, 0.0).sum(2) / seen.sum(2).clamp(min=1)
            of_keys = mean.gather(2, layer.summary["labels"].long()).masked_fill(layer.gone, torch.inf)
            figures.append(of_keys.flatten(1).to(share.device))
        ranked = torch.cat(figures, dim=1).sort(dim=1).values
        last = ranked.isfinite().sum(1).clamp(min=1) - 1
        at = (1 - share.double()).clamp(min=0) * last
        low, high = (ranked.gather(1, x.long()[:, None])[:, 0].double() for x in (at.floor(), at.ceil()))
        return (low + (high - low) * (at - at.floor())).float()

    # --- a step ---------------------------------------------------------------------------------------------------
    def wanted(self, count: Tensor, there: Tensor) -> Tensor:
        return torch.minimum((count * self.ceiling).long(), there)

    def rate(self, step: ReadStep) -> Tensor:
        estimates = self.estimate(step.query[:, :, None], step.summary, step.scaling)[:, :, 0]
        return estimates.gather(2, step.summary["labels"].long())

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """The best that reach the threshold; those of a lone cluster do, however their estimate is rounded."""
        assert step.level is not None
        return best(self.rate(step), step, step.level * (1 - TIE)), {}


def _nearest(doubled: Tensor, centres: Tensor, absent: Tensor) -> Tensor:
    """``[B, Hkv, P]`` long: the centre of ``[B, Hkv, C, D]`` with the smallest distance to each half of ``doubled [B, Hkv, P,
    D]``, of equal ones the first; those that are ``absent [B, Hkv, C]`` are none."""
    length = centres.square().sum(-1).masked_fill_(absent, torch.inf)[:, :, None]
    width = max(1, CHUNK // max(1, absent.numel()))
    labels = [(length - part @ centres.mT).argmin(-1) for part in doubled.split(width, dim=2)]
    return labels[0] if len(labels) == 1 else torch.cat(labels, dim=2)


def _members(x: Tensor, labels: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Sums ``[B, Hkv, C, D]`` float32 of ``x [B, Hkv, P, D]`` by their ``labels``, of which ``number`` is none, and the
    sizes of the clusters, ``[B, Hkv, C]`` float32. As products, so that the order of the sums is the same every time."""
    each = torch.arange(number, device=x.device)[:, None]
    width = max(1, CHUNK // max(1, x.shape[:2].numel() * number))
    parts = []
    for part, label in zip(x.split(width, dim=2), labels.split(width, dim=2), strict=True):
        mine = (label[:, :, None] == each).float()
        parts.append((mine @ part.float(), mine.sum(-1)))
    sums, sizes = parts[0]
    for more, others in parts[1:]:
        sums, sizes = sums + more, sizes + others
    return sums, sizes
