"""Max-min selection in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..copies import first_copies, of_first, pairs_of_first
from ..greedy import by_row, has_room, largest, row_groups

#: products made at once: on a CPU what follows finds them in the cache of a core
CACHED, BLOCK = 1 << 19, 1 << 22
#: the most tokens of which a CPU keeps all distances where they take more memory than the vectors, 64 MiB of a picture
KEPT = 4096


def max_min_definition(
    x: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None, limit: Tensor
) -> Tensor:
    """:func:`.max_min` in plain torch: a pick is one row of distances, a minimum and an argmax."""
    if len(groups := row_groups(x)) > 1:
        found = [max_min_definition(x[g], valid[g], count[g], noise, most, limit[g]) for g in groups]
        return torch.cat(found)
    first = first_copies(x, valid)
    keeps = has_room(x) or (x.device.type == "cpu" and x.shape[1] <= KEPT)
    all_pairs = x.new_empty(len(x), x.shape[1], x.shape[1]) if keeps else None
    nearest = of_copies(_nearest(x, valid, noise, all_pairs), first)
    all_pairs = None if all_pairs is None else pairs_of_first(all_pairs, first, 0.0)
    far, rows = torch.full_like(limit, -torch.inf), torch.arange(len(x), device=x.device)
    merit = opening(nearest, valid, limit)
    # minus infinity is the smaller of any two: what is picked or padding stays out
    left = limit.masked_fill(~valid, -torch.inf)
    for i in range(largest(count, most)):
        pick = merit.argmax(1)
        far[rows, pick] = torch.where(i < count, left[rows, pick], far[rows, pick])
        if all_pairs is None:
            away = of_first(distance(by_row(x, x[rows, pick]), noise), first)
            if first is not None:
                away = away.masked_fill(first == first[rows, pick][:, None], 0.0)
        else:
            away = all_pairs[rows, pick]
        left[rows, pick] = -torch.inf
        merit = left = torch.minimum(left, away)
    return far


def opening(nearest: Tensor, valid: Tensor, limit: Tensor) -> Tensor:
    """``[N, n]``: by what the first pick is made: the ``limit``, or ``nearest`` among those without one; all ``[N, n]``."""
    free = valid & limit.isinf()
    return torch.where(free.any(1, keepdim=True), nearest.masked_fill(~free, -1.0), limit).masked_fill(
        ~valid, -torch.inf
    )


def distance(cosine: Tensor, noise: float) -> Tensor:
    """``1 - cosine``, zero below ``noise``; ``cosine`` is overwritten."""
    away = cosine.neg_().add_(1.0)
    return away.masked_fill_(away < noise, 0.0)


def all_distances(x: Tensor, first: Tensor | None, noise: float) -> Tensor:
    """``[N, n, n]``, the same for all copies; ``first [N, n]`` are the first of them."""
    return pairs_of_first(distance(torch.bmm(x, x.transpose(1, 2)), noise), first, 0.0)


def of_copies(nearest: Tensor, first: Tensor | None) -> Tensor:
    """``nearest [N, n]`` as the first copy has it, and zero where there is more than one."""
    if first is None:
        return nearest
    copy = (first != torch.arange(first.shape[1], device=first.device)).long()
    several = torch.zeros_like(first).scatter_reduce(1, first, copy, "amax").gather(1, first)
    return nearest.gather(1, first).masked_fill(several > 0, 0.0)


def nearest_of(away: Tensor, valid: Tensor) -> Tensor:
    """``[N, n]``: the distance of every token to the nearest other one, from all ``away [N, n, n]``."""
    own = torch.eye(away.shape[1], dtype=torch.bool, device=away.device)
    away = away.masked_fill(own | ~(valid[:, None] & valid[..., None]), torch.inf)
    # both ways, so that two that are nearest to each other tie
    return torch.minimum(away.amin(2), away.amin(1))


def _nearest(x: Tensor, valid: Tensor, noise: float, into: Tensor | None) -> Tensor:
    """The same from ``x [N, n, D]``, in blocks of rows; a pair of blocks is looked at once, for both. All distances are written
    ``into [N, n, n]``."""
    rows, slots = valid.shape
    nearest = torch.full((rows, slots), torch.inf, device=x.device)
    height = max(1, (CACHED if x.device.type == "cpu" else BLOCK) // max(1, rows * slots))
    number = torch.arange(slots, device=x.device)
    for top in range(0, slots, height):
        part = slice(top, top + height)
        away = distance(torch.bmm(x[:, part], x[:, top:].transpose(1, 2)), noise)
        if into is not None:
            into[:, part, top:], into[:, top:, part] = away, away.mT
        out = (number[part, None] == number[top:]) | ~(valid[:, part, None] & valid[:, None, top:])
        away = away.masked_fill_(out, torch.inf)
        nearest[:, part] = torch.minimum(nearest[:, part], away.amin(2))
        nearest[:, top:] = torch.minimum(nearest[:, top:], away.amin(1))
    return nearest
