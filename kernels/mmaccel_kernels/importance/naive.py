"""Attention importance in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

#: logits held at once
BLOCK = 1 << 22


def importance_definition(
    query: Tensor, key: Tensor, scaling: float, weight: Tensor | None, valid: Tensor | None, visible: Tensor | None
) -> Tensor:
    """:func:`.importance` per query head in plain torch, in blocks of queries, each with the keys it may see."""
    batch, heads, queries, _ = query.shape
    keys, old = key.shape[2], key.shape[2] - queries
    grouped, against = query.unflatten(1, (key.shape[1], -1)).float(), key.float().transpose(2, 3)
    sums = torch.zeros(*grouped.shape[:3], keys, device=query.device)
    place = torch.arange(keys, device=query.device)
    height = max(1, BLOCK // max(1, batch * heads * keys))
    for top in range(0, queries, height):
        rows = slice(top, min(top + height, queries))
        upto = keys if visible is not None else old + rows.stop
        # the heads of a group as rows: keys that are broadcast to them would be copied for every block
        block = grouped[:, :, :, rows]
        logits = (block.flatten(2, 3) @ against[..., :upto]).unflatten(2, block.shape[2:4]) * scaling
        if visible is not None:
            seen = visible[:, :, None, rows]
        else:
            seen = place[:upto] <= place[old + top : old + rows.stop, None]
        if valid is not None:
            seen = seen & valid[:, None, None, None, :upto]
        # a query that sees nothing has no softmax
        paid = logits.masked_fill_(~seen, -torch.inf).softmax(-1).nan_to_num_(0.0)
        if weight is not None:
            paid = paid * weight[:, None, None, rows, None]
        sums[..., :upto] += paid.sum(3)
    return sums.flatten(1, 2)
