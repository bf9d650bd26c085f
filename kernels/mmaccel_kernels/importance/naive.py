"""Attention importance in plain torch: the definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: logits held at once: on a CPU they stay in the cache of a core; queries of a block at least
CACHED, BLOCK, ROWS = 1 << 18, 1 << 22, 16


@dataclass(frozen=True)
class Importance:
    """Result of one pass over the attention of some queries.

    sums : ``[B, Hq, K]`` float32, see :func:`.importance`.
    read : ``[B, Hq, q, Dv]`` like the values, the attention's output, zero for a query that sees no key; None without values.
    nats : ``[B]`` float64, the entropy of the attention that each query pays, summed over queries and heads; None unless asked
        for.
    """

    sums: Tensor
    read: Tensor | None = None
    nats: Tensor | None = None


def importance_definition(
    query: Tensor, key: Tensor, scaling: float, weight: Tensor | None, valid: Tensor | None, visible: Tensor | None
) -> Tensor:
    """:func:`.importance` per query head in plain torch, in blocks of queries, each with the keys it may see."""
    return importance_pass(query, key, scaling, weight, valid, visible).sums


def importance_pass(
    query: Tensor,
    key: Tensor,
    scaling: float,
    weight: Tensor | None = None,
    valid: Tensor | None = None,
    visible: Tensor | None = None,
    value: Tensor | None = None,
    entropy: bool = False,
) -> Importance:
    """:func:`importance_definition`, and of the same logits the attention's output over ``value [B, Hkv, K, Dv]``, and its
    entropy."""
    batch, heads, queries, width = query.shape
    kv, keys = key.shape[1:3]
    group, old = heads // max(1, kv), keys - queries
    # the heads of a group as rows: keys that are broadcast to them would be copied for every block
    scaled = (query.float() * scaling).reshape(batch * kv, group, queries, width)
    against = key.float().flatten(0, 1).transpose(1, 2)
    values = None if value is None else value.float().flatten(0, 1)
    sums = torch.zeros(batch, kv, group, keys, device=query.device)
    parts: list[Tensor] = []
    nats = torch.zeros(batch, dtype=torch.float64, device=query.device) if entropy else None
    size = CACHED if query.device.type == "cpu" else BLOCK
    height = max(ROWS, size // max(1, batch * heads * keys))
    blind = visible is not None or valid is not None
    # where every query sees something finite: what is hidden counts nothing, and nothing times infinity is no number
    low = torch.finfo(torch.float32).min
    hide = torch.full((min(height, queries),) * 2, -torch.inf if blind else low, device=query.device).triu(1)
    for top in range(0, queries, height):
        rows = slice(top, min(top + height, queries))
        count, upto = rows.stop - top, keys if visible is not None else old + rows.stop
        logits = torch.bmm(scaled[:, :, rows].reshape(batch * kv, -1, width), against[..., :upto])
        block = logits.view(batch, kv, group, count, upto)
        if visible is None:
            block[..., old + top :] += hide[:count, :count]
        else:
            block.masked_fill_(~visible[:, :, None, rows], -torch.inf)
        if valid is not None:
            block.masked_fill_(~valid[:, None, None, None, :upto], -torch.inf)
        # in place the block is still in the cache when it is summed
        paid = torch.softmax(logits, -1, out=None if entropy or logits.requires_grad else logits)
        if blind:
            # a query that sees nothing has no softmax
            paid.nan_to_num_(0.0)
        if nats is not None:
            most, share = logits.amax(-1), paid.amax(-1)
            mean = logits.clamp_(min=low) if blind else logits
            mean = mean.mul_(paid).sum(-1)
            nats += torch.where(share > 0, most - share.log() - mean, 0.0).view(batch, -1).sum(1)
        if values is not None:
            parts.append(torch.bmm(paid, values[:, :upto]).view(batch * kv, group, count, -1))
        paid = paid.view(batch, kv, group, count, upto)
        if weight is not None:
            paid.mul_(weight[:, None, None, rows, None])
        sums[..., :upto] += paid.sum(3)
    read = None
    if value is not None:
        whole = torch.cat(parts, 2) if parts else query.new_zeros(batch * kv, group, 0, value.shape[3])
        read = whole.to(value.dtype).view(batch, heads, queries, -1)
    return Importance(sums.view(batch, heads, keys), read, nats)
