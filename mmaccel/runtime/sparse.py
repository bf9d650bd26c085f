"""Policies that drop nothing for good: at every decode step they choose which visual keys the upper layers read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv.layer import CompressedLayer
from ..kv.shared import Shared
from ..kv.sparse import SparseMemory, SparseRead
from ..method import LayerAttention, Policy


def note_prompt(shared: Shared, table: Tensor, count: Tensor) -> None:
    """Carry with the cache what a prompt adds: its ``table [B, n, 4]`` of places, and how many more visual keys are to be read,
    ``count [B]``."""
    shared.grid_table = table
    shared.sparse = SparseMemory(count if shared.sparse is None else shared.sparse.count + count)


def first_layer(policy: Policy, depth: int) -> int:
    """The layer from which on a policy works, a number or a share of the depth; at least 1."""
    layer = getattr(policy, "layer", 1)
    return min(max(1, layer if isinstance(layer, int) else int(layer * depth + 0.5)), depth)


def sparse_read(
    policy: Policy, shared: Shared, layer: CompressedLayer, first: int, attention: LayerAttention
) -> SparseRead | None:
    """What the layers from ``first`` on read in this step, chosen by the attention of its one token in the ``layer`` below;
    what was attended to and chosen is carried to the next step. None, which is everything, where :func:`note_prompt`
    has left nothing with the cache."""
    if shared.grid_table is None or shared.sparse is None:
        return None
    device, heads = attention.query.device, attention.key.shape[1]
    paid = attention.attention(0, 1)[:, :, 0].unflatten(1, (heads, -1))
    index = layer.index.by_head.long()
    # heads that store the same keys have one index
    paid = paid.mean((1, 2))[:, None] if index.shape[1] == 1 else paid.mean(2) / heads
    table, end = shared.grid_table.to(device), shared.grid_table.shape[1]
    there = (index >= 0) & (index < end)
    at, shape = torch.where(there, index, end), (*index.shape[:2], end + 1)
    by_place = paid.new_zeros(shape).scatter_(2, at, paid).sum(1)[:, :end]
    stored = there.new_zeros(shape).scatter_(2, at, True).any(1)[:, :end]
    visual = (table[..., 0] >= 0) & stored
    memory = shared.sparse = shared.sparse.to(device)
    chosen = policy.recall(by_place, memory.paid, visual, memory.count, memory.chosen) & visual
    memory.paid, memory.chosen = by_place, chosen
    return SparseRead(first, chosen | ~visual)
