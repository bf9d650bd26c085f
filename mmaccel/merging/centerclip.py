"""CenterCLIP: the tokens of a few neighbouring frames are clustered, and the medoids stay."""

from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import group_sizes
from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .film import equal_parts, newline_targets, share

#: the most tokens that are clustered together; all their pairs are in memory at once
MOST = 4096


@register
class CenterClip(ProjectorMethod):
    """Segment-wise k-medoids clustering.

    *CenterCLIP: Token Clustering for Efficient Text-Video Retrieval*, SIGIR 2022, arXiv 2205.00823.

    A clip is cut into segments of ``frames`` frames; the tokens of a segment are clustered with k-medoids, and the
    medoids stay, in raster order. Initial medoids (KKZ): the token of largest L2 norm, then repeatedly the one farthest from
    its nearest medoid. In a step every token joins its nearest medoid (the first on a tie), and the member with the smallest
    sum of distances to the others becomes the medoid (the lower slot on a tie). Steps end when no medoid changes.

    An image, or each tile of one, is a segment of its own; the budget is apportioned to segments by size. A segment of
    more than 4,096 tokens is cut into runs of equal length. Tokens without a cell (newlines) are dropped first.

    Parameters
    ----------
    frames : frames per segment. The paper cuts the 12 frames of an MSR-VTT clip into 6 segments, with 49 centres each.
    distance : ``euclidean`` (the paper's) or ``cosine``.
    aggregate : ``medoid`` keeps the medoid as it is (the paper's); ``mean`` puts the cluster's mean in its place.
    iterations : the most steps. The program's command line has 100, its class 80.

    Paper and program: the program runs between the CLIP blocks of a fine-tuned model, with the means of the segment's CLS
    tokens; here it runs on what the language model reads. Its distances are those of ``torch.cdist``, whose rounding puts a
    token some 1e-3 away from itself and so decides which of two members is the medoid; here that is a tie.
    """

    name = "centerclip"
    summary = "k-medoids of the tokens of neighbouring frames"
    paper = "arXiv 2205.00823"
    unit = "picture"
    default_retain = 0.5
    limits = {"frames": "[1, inf)", "iterations": "[1, inf)"}

    frames: int = 2
    distance: Literal["euclidean", "cosine"] = "euclidean"
    aggregate: Literal["medoid", "mean"] = "medoid"
    iterations: int = 80

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the medoids, or the means of their clusters at their slots."""
        here, count, target = newline_targets(tokens, count)
        number = frame_numbers(tokens)
        clip = tokens.grid[:, :1].to(here.device) > 1
        part, kept = share(cut(torch.where(clip & (number >= 0), number // self.frames, number)), count)
        for rows, slots, keep in equal_parts(part, kept):
            x = tokens.features[rows, slots].float()
            medoids, cluster = k_medoids(x, distances(x, self.distance), keep, self.iterations)
            if self.aggregate == "mean":
                target[rows, slots] = slots.gather(1, medoids.gather(1, cluster))
            else:
                stay = slots.gather(1, medoids)
                target[rows, stay] = stay
        if self.aggregate == "mean":
            return Reduction.merge(target, tokens.valid)
        return Reduction(target >= 0, tokens.valid)


def cut(part: Tensor) -> Tensor:
    """Parts ``[N, n]`` of more than :data:`MOST` tokens cut into runs of equal length; the parts are consecutive."""
    groups = max(1, int(part.max()) + 1)
    size = group_sizes(part, groups)
    pieces = (size + MOST - 1) // MOST
    first, start = pieces.cumsum(1) - pieces, size.cumsum(1) - size
    inside = part.clamp(min=0)
    rank = (part >= 0).cumsum(1) - 1 - start.gather(1, inside)
    piece = rank * pieces.gather(1, inside) // size.gather(1, inside).clamp(min=1)
    return torch.where(part < 0, -1, first.gather(1, inside) + piece)


def distances(x: Tensor, kind: str) -> Tensor:
    """``[F, m, m]`` distances of ``x [F, m, D]``: symmetric, zero between copies, and the same for all copies of a token."""
    if kind == "cosine":
        unit = normalize(x, dim=-1)
        away = 1.0 - unit @ unit.transpose(1, 2)
    else:
        away = torch.cdist(x, x)
    return pairs_of_first(torch.minimum(away, away.transpose(1, 2)).clamp_(min=0), first_copies(x), 0.0)


def k_medoids(x: Tensor, away: Tensor, k: int, iterations: int = 80) -> tuple[Tensor, Tensor]:
    """Cluster ``x [F, m, D]`` around ``k`` medoids by the distances ``away [F, m, m]``.

    Returns the medoids ``[F, k]``, ascending, and the cluster of every token ``[F, m]``.
    """
    rows = torch.arange(len(x), device=x.device)[:, None]
    place = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
    medoids = torch.empty(len(x), k, dtype=torch.long, device=x.device)
    picked = torch.zeros_like(place, dtype=torch.bool)
    near = x.float().norm(dim=-1)
    for i in range(k):
        pick = near.masked_fill(picked, -torch.inf).argmax(1, keepdim=True)
        medoids[:, i : i + 1] = pick
        picked = picked.scatter(1, pick, True)
        row = away[rows, pick][:, 0]
        near = row if i == 0 else torch.minimum(near, row)
    for _ in range(iterations):
        cluster = _join(away, medoids)
        inside = cluster[:, :, None] == cluster[:, None]
        cost = (away * inside).sum(2)
        least = torch.full((len(x), k), torch.inf, device=x.device).scatter_reduce(1, cluster, cost, "amin")
        first = torch.where(cost == least.gather(1, cluster), place, x.shape[1])
        moved = torch.full_like(medoids, x.shape[1]).scatter_reduce(1, cluster, first, "amin")
        if torch.equal(moved, medoids):
            break
        medoids = moved
    medoids = medoids.sort(1).values
    return medoids, _join(away, medoids)


def _join(away: Tensor, medoids: Tensor) -> Tensor:
    """``[F, m]``: the number of the nearest medoid of every token; a medoid's own, even where another is a copy of it."""
    number = torch.arange(medoids.shape[1], device=away.device).expand_as(medoids)
    near = away.gather(2, medoids[:, None].expand(-1, away.shape[1], -1)).argmin(2)
    return near.scatter(1, medoids, number)
