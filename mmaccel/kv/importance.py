"""How much attention every key received, in passes over blocks of queries; the map itself never exists."""

from __future__ import annotations

from typing import Literal

import torch
from mmaccel_kernels.importance import importance
from torch import Tensor

from ..layers.streaming import row_blocks, upto
from ..method import LayerAttention

#: how the query heads of one key head are joined
Join = Literal["mean", "max", "sum"]


def column_sums(attention: LayerAttention, weight: Tensor | None = None) -> Tensor:
    """``[B, Hq, K]`` float32: the attention every key receives, summed over the queries.

    Parameters
    ----------
    weight : ``[B, q]`` float, how much each query counts (default 1); leading queries of no weight are not computed.
    """
    query, visible = attention.query, attention.visible
    if weight is not None:
        asked = (weight != 0).any(0).nonzero()
        first = int(asked[0]) if len(asked) else query.shape[2]
        query, weight = query[:, :, first:], weight[:, first:].float()
        visible = None if visible is None else visible[:, :, first:]
    return importance(query, attention.key, scaling=attention.scaling, weight=weight, visible=visible)


def share_seen(attention: LayerAttention, rows: Tensor, threshold: float) -> Tensor:
    """``[B]`` float32: of all entries the chosen queries may attend to, the share of at least ``threshold`` times the
    largest of its row; mean over heads.

    Parameters
    ----------
    rows : ``[B, q]`` bool.
    """
    batch = len(rows)
    strong, entries = (torch.zeros(batch, device=rows.device, dtype=torch.float64) for _ in range(2))
    asked = rows.any(0).cpu()
    for start, stop in row_blocks(attention):
        there = asked[start:stop].nonzero()[:, 0].tolist()
        if not there:
            continue
        start, stop = start + there[0], start + there[-1] + 1
        # a ratio of probabilities is a difference of logits
        logits = upto(attention, stop).logits(start, stop)
        seen = (logits > -torch.inf) & rows[:, None, start:stop, None]
        least = logits.amax(-1, keepdim=True) + torch.tensor(threshold).log()
        strong += ((logits >= least) & seen).sum((1, 2, 3))
        entries += seen.sum((1, 2, 3))
    return (strong / entries.clamp(min=1)).float()


def by_group(figures: Tensor, heads: int, join: Join = "mean") -> Tensor:
    """``[B, Hq, K]`` joined over the query heads of each of ``heads`` key heads, ``[B, Hkv, K]``."""
    grouped = figures.unflatten(1, (heads, -1))
    return grouped.amax(2) if join == "max" else grouped.sum(2) if join == "sum" else grouped.mean(2)


def behind_pictures(attention: LayerAttention) -> Tensor:
    """``[B, q]`` bool: the text behind the last picture; all text of rows that end in one."""
    # padding is in front, so what is not text is a picture from some place on
    behind = attention.text & ((~attention.text).flip(1).cumsum(1).flip(1) == 0)
    return torch.where(behind.any(1, keepdim=True), behind, attention.text)
