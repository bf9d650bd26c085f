"""Squeezed Attention: keys are read whose cluster's centroid promises enough attention."""

from collections.abc import Sequence

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

    With ``coarse`` there are two levels: the mean keys are clustered again, and a step first estimates those few. What is below
    a threshold of its own is out, and ``N_j`` is 0 for its clusters in the estimates of the others. The program, too, looks up
    both levels in full.

    Parameters
    ----------
    clusters : for every KV head, a number or a share of its visual keys. A twentieth, as in the paper.
    iterations : of k-means, which starts from evenly spaced keys.
    window : queries at the end of the prompt that set the threshold, as in the program.
    ceiling : at most so many times the budget is read in one step, the best; what is beyond is not waited for.
    reduce : how the query heads of a KV head agree on its keys: by the ``max`` of their estimates, or by the ``mean``.
    coarse : for every KV head, clusters of clusters, a number or a share of its visual keys; 0 for one level.
    coarse_share : share of the visual keys that the coarse level passes on, at least ``retain``. The program offers .5, .3, .2
        and .1, of which this is the largest.
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
        "coarse": "[0, inf) or [0.0, 1.0]",
        "coarse_share": "(0, 1]",
    }

    clusters: float = 0.05
    iterations: int = 10
    window: int = 100
    ceiling: float = 2.0
    reduce: str = "max"
    coarse: float = 0
    coarse_share: float = 0.5

    @property
    def thresholds(self) -> int:
        return 2 if self.coarse else 1

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``labels [B, Hkv, P]`` int32, the cluster of every key; ``centroids [B, Hkv, C, D]``, their mean keys; and
        ``weights [B, Hkv, C]`` float32, the logarithms of their sizes. Of two levels also ``parents [B, Hkv, C]`` int32, the
        coarse cluster of every cluster, and ``coarse [B, Hkv, C', D]`` and ``coarse_weights``."""
        there = units.there[..., 0].expand(units.keys.shape[:3])
        keys = units.keys[:, :, :, 0].masked_fill(~there[..., None], 0.0)
        labels = self.cluster(keys, there)
        number = _number(self.clusters, keys.shape[2])
        sums, sizes = _members(keys, labels, number)
        centroids = (sums / sizes.clamp(min=1)[..., None]).to(keys.dtype)
        made = {"labels": labels.clamp(max=number - 1).int(), "centroids": centroids, "weights": sizes.log()}
        if not self.coarse:
            return made
        most = min(_number(self.coarse, keys.shape[2]), number)
        own = torch.minimum(_own(self.coarse, there.sum(-1), most), (sizes > 0).sum(-1))
        parents = _clustered(centroids, sizes > 0, own, most, self.iterations)
        sums, filled = _members(centroids, parents, most)
        each = torch.arange(most, device=keys.device)[:, None]
        sizes = ((parents[:, :, None] == each) * sizes[:, :, None]).sum(-1)
        coarse = (sums / filled.clamp(min=1)[..., None]).to(keys.dtype)
        return {**made, "parents": parents.clamp(max=most - 1).int(), "coarse": coarse, "coarse_weights": sizes.log()}

    def cluster(self, keys: Tensor, there: Tensor) -> Tensor:
        """The cluster of those of ``keys [B, Hkv, P, D]`` that are ``there``; ``C``, which is no cluster, of the others: ``[B,
        Hkv, P]`` long. A row has as many clusters as it has by itself."""
        most, size = _number(self.clusters, keys.shape[2]), there.sum(-1)
        own = torch.minimum(_own(self.clusters, size, most), size)
        return _clustered(keys, there, own, most, self.iterations)

    # --- the thresholds -------------------------------------------------------------------------------------------
    def estimate(self, queries: Tensor, centroids: Tensor, weights: Tensor, scaling: float) -> Tensor:
        """The attention of ``queries [B, Hq, W, D]`` to one key of every cluster, ``[B, Hkv, W, C]`` float32."""
        heads = centroids.shape[1]
        grouped = by_kv_head(queries.float(), heads).flatten(2, 3)
        logits = (grouped @ centroids.float().mT).unflatten(2, (-1, queries.shape[2])) * scaling
        total = (logits + weights[:, :, None, None]).logsumexp(-1, keepdim=True)
        return agree((logits - total).exp().flatten(3), self.reduce).unflatten(2, (queries.shape[2], -1))

    def level(self, layers: Sequence[Observed], share: Tensor) -> Tensor:
        """The estimate that the ``share [B]`` of all keys of all layers and heads exceed, ``[B]`` float32; of two levels ``[B,
        2]``, that of the coarse one last."""
        fine = self._level(layers, share, "centroids", "weights")
        if not self.coarse:
            return fine
        return torch.stack(
            [fine, self._level(layers, share.clamp(min=self.coarse_share), "coarse", "coarse_weights")], 1
        )

    def _level(self, layers: Sequence[Observed], share: Tensor, centroids: str, weights: str) -> Tensor:
        figures = []
        for layer in layers:
            held = layer.summary
            estimates = self.estimate(layer.queries, held[centroids], held[weights], layer.scaling)
            seen = layer.seen[:, None, :, None]
            mean = estimates.masked_fill(~seen, 0.0).sum(2) / seen.sum(2).clamp(min=1)
            labels = held["labels"].long()
            labels = labels if centroids == "centroids" else held["parents"].long().gather(2, labels)
            figures.append(mean.gather(2, labels).masked_fill(layer.gone, torch.inf).flatten(1).to(share.device))
        ranked = torch.cat(figures, dim=1).sort(dim=1).values
        last = ranked.isfinite().sum(1).clamp(min=1) - 1
        at = (1 - share.double()).clamp(min=0) * last
        low, high = (ranked.gather(1, x.long()[:, None])[:, 0].double() for x in (at.floor(), at.ceil()))
        return (low + (high - low) * (at - at.floor())).float()

    # --- a step ---------------------------------------------------------------------------------------------------
    def wanted(self, count: Tensor, there: Tensor) -> Tensor:
        return torch.minimum((count * self.ceiling).long(), there)

    def rate(self, step: ReadStep) -> Tensor:
        query, held, weights = step.query[:, :, None], step.summary, step.summary["weights"]
        if self.coarse:
            assert step.level is not None
            coarse = self.estimate(query, held["coarse"], held["coarse_weights"], step.scaling)[:, :, 0]
            passed = (coarse >= step.level[:, 1, None, None] * (1 - TIE)).gather(2, held["parents"].long())
            weights = weights.masked_fill(~passed, -torch.inf)
        estimates = self.estimate(query, held["centroids"], weights, step.scaling)[:, :, 0]
        if self.coarse:
            estimates = estimates.masked_fill(~passed, -torch.inf)
        return estimates.gather(2, held["labels"].long())

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """The best that reach the threshold; those of a lone cluster do, however their estimate is rounded."""
        assert step.level is not None
        level = step.level[:, 0] if self.coarse else step.level
        return best(self.rate(step), step, level * (1 - TIE)), {}


def _number(clusters: float, keys: int) -> int:
    """Number of clusters, a number or a share, of a number of keys."""
    wanted = clusters if isinstance(clusters, int) else int(clusters * keys + 0.5)
    return min(max(1, wanted), keys)


def _own(clusters: float, size: Tensor, most: int) -> Tensor:
    """The same of every row and head with ``size [B, Hkv]`` long keys, at most so many."""
    if isinstance(clusters, int):
        return torch.full_like(size, clusters).clamp(max=most)
    return (clusters * size.double() + 0.5).long().clamp(min=1, max=most)


def _clustered(keys: Tensor, there: Tensor, own: Tensor, most: int, iterations: int) -> Tensor:
    """``own [B, Hkv]`` clusters, at most so many, of those of ``keys [B, Hkv, P, D]`` that are ``there``, by k-means of their
    directions: ``[B, Hkv, P]`` long, ``most`` for the others."""
    size, start = there.sum(-1), torch.arange(most, device=keys.device)
    absent = start >= own[..., None]
    at = (2 * start + 1) * size[..., None] // (2 * own[..., None].clamp(min=1))
    at = true_first(there).gather(2, at.clamp(max=keys.shape[2] - 1))
    at = at[..., None].expand(-1, -1, -1, keys.shape[3])
    directions = torch.nn.functional.normalize(keys.float(), dim=-1)
    doubled, gone = 2 * directions, ~there
    centres = directions.gather(2, at)
    for _ in range(iterations):
        labels = _nearest(doubled, centres, absent).masked_fill_(gone, most)
        sums, sizes = _members(directions, labels, most)
        centres = torch.where(sizes[..., None] > 0, sums / sizes[..., None], centres)
    return _nearest(doubled, centres, absent).masked_fill_(gone, most)


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
