"""Bounds of pages in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def page_bounds_definition(query: Tensor, extremes: Tensor, join: str) -> Tensor:
    """:func:`.page_bounds` as one product."""
    # what is positive of the query meets the largest, what is negative the smallest
    query = torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1).float()
    batch, heads, pages, width = extremes.shape
    bounds = query.view(batch * heads, -1, width) @ extremes.float().view(batch * heads, pages, width).mT
    bounds = bounds.amax(1) if join == "max" else bounds.mean(1)
    return bounds.view(batch, heads, pages)
