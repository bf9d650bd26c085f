"""Votes of query heads in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def votes_definition(query: Tensor, keys: Tensor, slots: Tensor, interleaved: bool) -> Tensor:
    """:func:`.votes` as one product and one softmax."""
    heads = keys.shape[1]
    grouped = query.unflatten(1, (-1, heads)).transpose(1, 2) if interleaved else query.unflatten(1, (heads, -1))
    logits = torch.einsum("bkgd,bkld->bkgl", grouped.float(), keys.float())
    at = slots.clamp(min=0).long().expand(-1, heads, -1)[:, :, None].expand(-1, -1, grouped.shape[2], -1)
    gone = slots < 0
    votes = logits.gather(3, at).masked_fill(gone[:, :, None], -torch.inf).softmax(-1)
    summed = votes.sum((1, 2))[:, None] if slots.shape[1] == 1 else votes.sum(2)
    return summed.masked_fill(gone, 0.0)
