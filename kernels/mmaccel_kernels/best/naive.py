"""The best units in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def best_units_definition(
    ratings: Tensor, count: Tensor, most: int, each: int = 1, gone: Tensor | None = None, least: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`.best_units` as a stable sort."""
    if gone is not None:
        ratings = ratings.masked_fill(gone, -torch.inf)
    ratings = ratings.unflatten(-1, (-1, each)).amax(-1)
    order = ratings.argsort(dim=-1, descending=True, stable=True)[..., :most]
    taken = (torch.arange(order.shape[-1], device=ratings.device) < count[..., None]).expand_as(order)
    if least is not None:
        taken = taken & (ratings.gather(-1, order) >= least[:, None, None])
    picked = order.masked_fill(~taken, ratings.shape[-1]).sort(dim=-1).values.int()
    return picked, taken.sum(-1).int()
