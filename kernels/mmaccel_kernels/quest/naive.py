"""Bounds of pages in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def page_bounds_definition(query: Tensor, extremes: Tensor, join: str) -> Tensor:
    """:func:`.page_bounds` as one product."""
    # what is positive of the query meets the largest, what is negative the smallest
    query = torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
    grouped = query.float().unflatten(1, (extremes.shape[1], -1))
    bounds = torch.einsum("bkgd,bkpd->bkgp", grouped, extremes.float())
    return bounds.amax(2) if join == "max" else bounds.mean(2)
