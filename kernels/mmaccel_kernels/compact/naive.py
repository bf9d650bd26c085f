"""Compaction in plain torch: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Compacted(NamedTuple):
    """Heads that store different counts, one after the other: ``[total, D]``, ``[total, Dv]``, and lengths ``[B, H]``."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class Plan(NamedTuple):
    """The places from which a number of kept slots are gathered, made once for keys and values of several layers.

    source : ``[total + 1]`` long, the slot of every output, counted over all heads and rows of the batch. begin : ``[total +
    1]`` long, 0 to ``total``. lengths : ``[B, H]`` long, how many every head keeps. total : the same in all.
    """

    source: Tensor
    begin: Tensor
    lengths: Tensor
    total: int


def compact_plan(kept: Tensor, total: int) -> Plan:
    """The plan of ``kept [B, H, K]`` bool, of which ``total`` are true; nothing waits for the device."""
    return Plan(*plan(kept, None, total), kept.sum(-1), total)


def compact_definition(
    keys: Tensor, values: Tensor, kept: Tensor | Plan, owner: Tensor | None, weight: Tensor | None, total: int | None
) -> Compacted:
    """:func:`.compact` in plain torch."""
    if isinstance(kept, Plan):
        source = kept.source[: kept.total]
        return Compacted(keys.flatten(0, 2)[source], values.flatten(0, 2)[source], kept.lengths)
    if owner is None:
        if total is None:
            return Compacted(keys[kept], values[kept], kept.sum(-1))
        source = plan(kept, None, total)[0][:total]
        return Compacted(keys.flatten(0, 2)[source], values.flatten(0, 2)[source], kept.sum(-1))
    source, begin = plan(kept, owner, int(kept.sum()) if total is None else total)
    factor = torch.ones_like(source, dtype=torch.float32) if weight is None else weight.flatten()[source]

    def summed(x: Tensor) -> Tensor:
        parts = x.flatten(0, 2)[source[: int(begin[-1])]].float() * factor[: int(begin[-1]), None]
        if not len(begin) - 1:
            return x.new_zeros(0, x.shape[-1])
        # sums in a fixed order, without atomics
        return torch.segment_reduce(parts, "sum", lengths=begin.diff(), axis=0, unsafe=True, initial=0.0).to(x.dtype)

    return Compacted(summed(keys), summed(values), kept.sum(-1))


def plan(kept: Tensor, owner: Tensor | None, total: int) -> tuple[Tensor, Tensor]:
    """The input rows of every output row, ``source [rows]`` long, of which output ``o`` takes ``begin[o]`` to ``begin[o + 1]``;
    made on the device without asking it."""
    flat = kept.flatten()
    rank = flat.cumsum(0) - 1
    if owner is None:
        row = torch.arange(len(flat), device=flat.device)
        source = row.new_empty(total + 1).scatter_(0, torch.where(flat, rank, total), row)
        return source, torch.arange(total + 1, device=flat.device)
    head = torch.arange(0, len(flat), kept.shape[-1], device=flat.device).view(*kept.shape[:2], 1)
    onto = torch.where(owner >= 0, rank[(owner.clamp(min=0) + head).flatten()].view_as(owner), total).flatten()
    begin = torch.searchsorted(onto.sort().values, torch.arange(total + 1, device=flat.device))
    return onto.argsort(stable=True), begin
