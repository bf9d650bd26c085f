"""Density peaks (DPC-KNN): cluster centres are dense tokens that are far from any denser one."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor

from .blocks import BLOCK


def density_peaks(x: Tensor, valid: Tensor, neighbours: int, strict: bool = False, sparser: bool = False) -> Tensor:
    """The score of every token as a cluster centre, ``[F, m]`` float32; -inf for padding.

    Rodriguez and Laio, *Clustering by fast search and find of density peaks*, Science 2014, with the density of Du et
    al. (DPC-KNN) as token clustering uses it:

    - ``d_ij = ||x_i - x_j|| / sqrt(D)``
    - ``rho_i = exp(-mean of the k smallest d_ij^2)``, including ``d_ii = 0``
    - ``delta_i = min d_ij over j with rho_j > rho_i``; for the densest token the largest distance in its set
    - score ``rho delta``

    Copies are at a distance of zero and equally dense. Distances are computed in blocks of rows, twice; no ``m x m`` matrix
    is in memory unless it fits one block.

    x : ``[F, m, D]``, ``F`` sets that are clustered separately.
    valid : ``[F, m]`` bool.
    neighbours : ``k``, cut to the number of tokens.
    strict : of equally dense tokens none counts as denser, so that all copies of a token are centres. The programs avoid that
        with noise on the density; here, by default, the lower slot counts as denser.
    sparser : ``delta_i`` is the distance to the nearest token that is less dense.
    """
    x = x.float().masked_fill(~valid[..., None], 0.0)
    frames, size = valid.shape
    if size == 0:
        return x.new_zeros(frames, 0)
    scale, place, first = x.shape[-1] ** -0.5, torch.arange(size, device=x.device), first_copies(x, valid)
    name = place.expand_as(valid) if first is None else first
    height = max(1, BLOCK // max(1, frames * size))
    tops = range(0, size, height)

    def distance(top: int) -> Tensor:
        away = torch.cdist(x[:, top : top + height], x) * scale
        if len(tops) == 1:
            # rounding must not make a distance depend on its direction
            away = torch.minimum(away, away.transpose(1, 2))
        # rounding must not make a token differ from itself or its copy
        return away.masked_fill_(name[:, top : top + height, None] == name[:, None], 0.0)

    once = distance(0) if len(tops) == 1 else None
    number = valid.sum(1)
    within = torch.arange(min(neighbours, size), device=x.device) < number[:, None]
    density, far = [], x.new_zeros(frames)
    for top in tops:
        away = distance(top) if once is None else once
        near = away.masked_fill(~valid[:, None], torch.inf).topk(within.shape[1], dim=2, largest=False).values
        near = near.masked_fill(~within[:, None], 0.0)
        density.append((-near.square().sum(2) / within.sum(1, keepdim=True).clamp(min=1)).exp())
        both = valid[:, None] & valid[:, top : top + height, None]
        far = torch.maximum(far, away.masked_fill(~both, 0.0).amax((1, 2)))
    rho = of_first(torch.cat(density, 1), first)
    ranked = -rho if sparser else rho
    delta = []
    for top in tops:
        away = distance(top) if once is None else once
        mine = ranked[:, top : top + height, None]
        denser = ranked[:, None] > mine
        if not strict:
            denser |= (ranked[:, None] == mine) & (place < place[top : top + height, None])
        to_denser = away.masked_fill(~(denser & valid[:, None]), torch.inf).amin(2)
        delta.append(torch.minimum(to_denser, far[:, None]))
    score = torch.cat(delta, 1) * rho
    return (of_first(score, first) if strict else score).masked_fill(~valid, -torch.inf)


def centres(score: Tensor, count: int) -> Tensor:
    """The slots of the ``count`` highest of ``score [F, m]``, ``[F, count]`` ascending; the lower slot on a tie."""
    return score.argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values


def nearest_centre(x: Tensor, chosen: Tensor) -> Tensor:
    """``[F, m]`` long: the number of the centre, of ``chosen [F, k]``, that every token of ``x [F, m, D]`` is nearest to.

    On a tie the first centre. A centre belongs to itself; any other copy of a centre to the first centre it equals.
    """
    x = x.float()
    middle = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
    height = max(1, BLOCK // max(1, len(x) * chosen.shape[1]))
    near = torch.cat(
        [torch.cdist(x[:, top : top + height], middle).argmin(2) for top in range(0, x.shape[1], height)], 1
    )
    number, first = torch.arange(chosen.shape[1], device=x.device).expand_as(chosen), first_copies(x)
    if first is None:
        return near.scatter(1, chosen, number)
    # by first copy, the first centre that is a copy of it; k where there is none
    home = torch.full_like(near, chosen.shape[1]).scatter_reduce(1, first.gather(1, chosen), number, "amin")
    near = home.gather(1, first.gather(1, chosen.gather(1, near))).gather(1, first)
    own = home.gather(1, first)
    return torch.where(own < chosen.shape[1], own, near).scatter(1, chosen, number)
