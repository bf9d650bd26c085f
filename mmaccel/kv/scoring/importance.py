"""Statistics of the attention that keys receive, computed over blocks of queries, without the whole map."""

from typing import Literal

import torch
from mmaccel_kernels.importance import importance, importance_pass
from torch import Tensor

from ...core.masks import question
from ...method import LayerAttention
from ...method.blocks import blocks_with, upto

#: how a figure is reduced over the query heads of one key head
Join = Literal["mean", "max", "sum"]


def column_sums(attention: LayerAttention, weight: Tensor | None = None) -> Tensor:
    """``[B, Hq, K]`` float32: the attention received by every key, summed over the queries.

    weight : ``[B, q]`` float, the weight of each query (default 1). Leading queries of weight zero are not computed; the host
        waits to count them, once if the same tensor is given for all layers.

    Where no query is left out and the attention has a :class:`~mmaccel.method.layers.SharedPass`, that is filled.
    """
    query, visible, first = attention.query, attention.visible, 0
    if weight is not None:
        first = attention.once(_first, weight)
        query, weight = query[:, :, first:], weight[:, first:].float()
        visible = None if visible is None else visible[:, :, first:]
    shared = attention.shared_pass
    if shared is not None and shared.query is attention.query and not first:
        given = attention.key, attention.scaling, weight, None, visible, shared.value, shared.entropy
        shared.found = importance_pass(query, *given)
        return shared.found.sums
    return importance(query, attention.key, scaling=attention.scaling, weight=weight, visible=visible)


def _first(attention: LayerAttention, weight: Tensor) -> int:
    """The first query with a ``weight [B, q]`` that is not zero in some row; ``q`` if there is none."""
    counted = (weight != 0).any(0).nonzero()
    return int(counted[0]) if len(counted) else weight.shape[1]


def _in_any_row(attention: LayerAttention, rows: Tensor) -> Tensor:
    """``[q]`` bool on the CPU: the queries chosen in any row of ``rows [B, q]`` bool."""
    return rows.any(0).cpu()


def share_seen(attention: LayerAttention, rows: Tensor, threshold: float) -> Tensor:
    """``[B]`` float32: the share of attention weights that are at least ``threshold`` times the largest of their query, of all
    that the chosen queries may have, over all heads.

    rows : ``[B, q]`` bool, the chosen queries.
    """
    batch = len(rows)
    strong, entries = (torch.zeros(batch, device=rows.device, dtype=torch.float64) for _ in range(2))
    for start, stop in blocks_with(attention, attention.once(_in_any_row, rows)):
        # a ratio of probabilities is a difference of logits
        logits = upto(attention, stop).logits(start, stop)
        seen = (logits > -torch.inf) & rows[:, None, start:stop, None]
        least = logits.amax(-1, keepdim=True) + torch.tensor(threshold).log()
        strong += ((logits >= least) & seen).sum((1, 2, 3))
        entries += seen.sum((1, 2, 3))
    return (strong / entries.clamp(min=1)).float()


def entropy(attention: LayerAttention) -> Tensor:
    """``[B]`` float32: the entropy of the attention paid by each query, in nats, mean over queries and heads."""
    shared, visible = attention.shared_pass, attention.visible
    result = None if shared is None or shared.query is not attention.query else shared.found
    if result is None or result.nats is None:
        result = importance_pass(attention.query, attention.key, attention.scaling, visible=visible, entropy=True)
    assert result.nats is not None
    batch, heads, queries, _ = attention.query.shape
    if visible is None:
        return (result.nats / max(1, heads * queries)).float()
    # queries of padding attend to nothing
    rows = visible.any(-1).sum((1, 2)) * (heads // visible.shape[1])
    return (result.nats / rows.clamp(min=1)).float()


def by_group(figures: Tensor, heads: int, join: Join = "mean") -> Tensor:
    """``figures [B, Hq, K]`` reduced over the query heads of each of ``heads`` key heads, ``[B, Hkv, K]``."""
    grouped = figures.unflatten(1, (heads, -1))
    return grouped.amax(2) if join == "max" else grouped.sum(2) if join == "sum" else grouped.mean(2)


def expected_queries(queries: Tensor, valid: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Mean ``[B, Hq, D]`` and covariance ``[B, Hq, D, D]``, float32, of queries at future positions.

    queries : ``[B, S, Hq, D]``, before RoPE. valid : ``[B, S]`` bool, the queries that count.
    rotation : see :func:`mean_rotation`.
    """
    weight = valid[:, :, None, None].float()
    count = weight.sum(1).clamp(min=1)
    mean = (queries.float() * weight).sum(1) / count
    off = (queries.float() - mean[:, None]) * weight
    covariance = torch.einsum("bshd,bshe->bhde", off, off) / count[..., None]
    return (rotation @ mean[..., None])[..., 0], rotation @ covariance @ rotation.mT


def mean_rotation(cos: Tensor, sin: Tensor) -> Tensor:
    """``[B, 1, D, D]`` float32: the mean over positions of the rotations by ``cos``, ``sin [B, n, D]`` of RoPE in the layout of
    two halves."""
    half = cos.shape[-1] // 2
    swap = torch.eye(half, device=cos.device)
    turn = torch.zeros(2 * half, 2 * half, device=cos.device)
    turn[:half, half:], turn[half:, :half] = -swap, swap
    rotation = torch.diag_embed(cos.float().mean(1)) + sin.float().mean(1)[:, :, None] * turn
    return rotation[:, None]


def energy(queries: Tensor, valid: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, D]`` float32: the mean square of every channel of ``queries [B, Hq, W, D]``, over those in ``valid [B, W]``
    bool and over the query heads of each of ``heads`` key heads."""
    weight = valid[:, None, :, None].float()
    mean = (queries.float() ** 2 * weight).sum(2) / weight.sum(2).clamp(min=1)
    return by_group(mean, heads)


def outgoing_norm(values: Tensor, output: Tensor) -> Tensor:
    """``[B, Hkv, K]`` float32: the L1 norm of ``values [B, Hkv, K, D]`` projected by ``output [d, Hq, D]`` (the output
    projection by query heads), mean over the query heads of a key head."""
    heads = values.shape[1]
    norms = []
    # one head at a time: the projected values of all heads are Hq times the hidden states of the prompt
    for head, projection in enumerate(output.float().unbind(1)):
        value = values[:, head * heads // output.shape[1]].float()
        norms.append((value @ projection.T).abs().sum(-1))
    return by_group(torch.stack(norms, dim=1), heads)


def behind_pictures(attention: LayerAttention) -> Tensor:
    """``[B, q]`` bool: the text after the last picture; all text of rows that end in a picture."""
    # padding is on the left, so after the first text all that is not text is visual
    return question(attention.text, ~attention.text)
