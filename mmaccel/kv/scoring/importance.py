"""How much attention every key received, in passes over blocks of queries; the map itself never exists."""

from __future__ import annotations

from typing import Literal

import torch
from mmaccel_kernels.importance import importance
from torch import Tensor

from ...core.masks import question
from ...method import LayerAttention
from ...method.blocks import row_blocks, upto

#: how the query heads of one key head are joined
Join = Literal["mean", "max", "sum"]


def column_sums(attention: LayerAttention, weight: Tensor | None = None) -> Tensor:
    """``[B, Hq, K]`` float32: the attention every key receives, summed over the queries.

    Parameters
    ----------
    weight : ``[B, q]`` float, how much each query counts (default 1); leading queries of no weight are not computed. The host
        waits to know them, once if the same tensor is given for all layers.
    """
    query, visible = attention.query, attention.visible
    if weight is not None:
        first = attention.once(_first, weight)
        query, weight = query[:, :, first:], weight[:, first:].float()
        visible = None if visible is None else visible[:, :, first:]
    return importance(query, attention.key, scaling=attention.scaling, weight=weight, visible=visible)


def _first(attention: LayerAttention, weight: Tensor) -> int:
    """The first query of any row with a weight ``[B, q]``; as many as there are, if none has."""
    asked = (weight != 0).any(0).nonzero()
    return int(asked[0]) if len(asked) else weight.shape[1]


def _asked(attention: LayerAttention, rows: Tensor) -> Tensor:
    """``[q]`` bool on the CPU: the queries that are asked in any of ``rows [B, q]``."""
    return rows.any(0).cpu()


def share_seen(attention: LayerAttention, rows: Tensor, threshold: float) -> Tensor:
    """``[B]`` float32: of all entries the chosen queries may attend to, the share of at least ``threshold`` times the
    largest of its row; mean over heads.

    Parameters
    ----------
    rows : ``[B, q]`` bool.
    """
    batch = len(rows)
    strong, entries = (torch.zeros(batch, device=rows.device, dtype=torch.float64) for _ in range(2))
    asked = attention.once(_asked, rows)
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


def entropy(attention: LayerAttention) -> Tensor:
    """``[B]`` float32: the entropy of what each query pays, in nats; mean over queries and heads."""
    batch, heads = attention.query.shape[:2]
    total = attention.query.new_zeros(batch, dtype=torch.float64)
    rows = total.clone()
    for start, stop in row_blocks(attention):
        logits = upto(attention, stop).logits(start, stop)
        most = logits.amax(-1, keepdim=True)
        # queries that are padding see nothing
        there = most[..., 0] > -torch.inf
        logits = (logits - most).nan_to_num(0.0, neginf=-torch.inf)
        weight = logits.exp()
        sum_ = weight.sum(-1)
        paid = sum_.log() - (weight * logits.clamp(min=torch.finfo(logits.dtype).min)).sum(-1) / sum_
        total += paid.masked_fill(~there, 0.0).sum((1, 2))
        rows += there.sum((1, 2))
    return (total / rows.clamp(min=1)).float()


def by_group(figures: Tensor, heads: int, join: Join = "mean") -> Tensor:
    """``[B, Hq, K]`` joined over the query heads of each of ``heads`` key heads, ``[B, Hkv, K]``."""
    grouped = figures.unflatten(1, (heads, -1))
    return grouped.amax(2) if join == "max" else grouped.sum(2) if join == "sum" else grouped.mean(2)


def expected_queries(queries: Tensor, there: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Mean ``[B, Hq, D]`` and covariance ``[B, Hq, D, D]``, float32, of queries at positions to come.

    Parameters
    ----------
    queries : ``[B, S, Hq, D]`` before RoPE. there : ``[B, S]`` bool, those that count.
    cos, sin : ``[B, n, D]``, of RoPE in the layout of two halves, at the positions to come.
    """
    weight = there[:, :, None, None].float()
    count = weight.sum(1).clamp(min=1)
    mean = (queries.float() * weight).sum(1) / count
    off = (queries.float() - mean[:, None]) * weight
    covariance = torch.einsum("bshd,bshe->bhde", off, off) / count[..., None]
    half = cos.shape[-1] // 2
    swap = torch.eye(half, device=cos.device)
    turn = torch.zeros(2 * half, 2 * half, device=cos.device)
    turn[:half, half:], turn[half:, :half] = -swap, swap
    rotation = torch.diag_embed(cos.float().mean(1)) + sin.float().mean(1)[:, :, None] * turn
    rotation = rotation[:, None]
    return (rotation @ mean[..., None])[..., 0], rotation @ covariance @ rotation.mT


def energy(queries: Tensor, there: Tensor, heads: int) -> Tensor:
    """The mean square of every channel of the queries, mean over the query heads of each of ``heads`` key heads: ``queries
    [B, Hq, W, D]``, of which ``there [B, W]`` count -> ``[B, Hkv, D]`` float32."""
    weight = there[:, None, :, None].float()
    mean = (queries.float() ** 2 * weight).sum(2) / weight.sum(2).clamp(min=1)
    return by_group(mean, heads)


def outgoing_norm(values: Tensor, output: Tensor) -> Tensor:
    """``values [B, Hkv, K, D]`` through the output projection ``[d, Hq, D]`` of each query head: the L1 norm of what arrives,
    mean over the query heads of a key head, ``[B, Hkv, K]`` float32."""
    heads = values.shape[1]
    norms = []
    # a head at a time: the projections of all are as large as the hidden states of that many prompts
    for head, projection in enumerate(output.float().unbind(1)):
        value = values[:, head * heads // output.shape[1]].float()
        norms.append((value @ projection.T).abs().sum(-1))
    return by_group(torch.stack(norms, dim=1), heads)


def behind_pictures(attention: LayerAttention) -> Tensor:
    """``[B, q]`` bool: the text behind the last picture; all text of rows that end in a picture."""
    # padding is in front, so behind the first text all that is not text is visual
    return question(attention.text, ~attention.text)
