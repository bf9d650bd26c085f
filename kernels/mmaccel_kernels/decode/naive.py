"""Decode attention in plain torch: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..pages import Pages


class Flat(NamedTuple):
    """Heads that store different counts, one after the other.

    keys : ``[total, D]``.
    values : ``[total, Dv]``.
    cu_lengths : ``[B Hkv + 1]`` int32 or int64; head ``h`` of row ``b`` owns rows ``cu[b Hkv + h]`` to ``cu[b Hkv + h + 1]``.
    width : columns of a mask that belong to these keys, at least as many as the longest head has.
    """

    keys: Tensor
    values: Tensor
    cu_lengths: Tensor
    width: int


def decode_attention_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: Flat | None = None,
    pages: Pages | None = None,
    visible: Tensor | None = None,
    tail: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`.decode_attention` means, in plain torch; for any number of queries and any pages."""
    b, hq, q, d = query.shape
    hkv, capacity = keys.shape[1:3]
    slot = torch.arange(capacity, device=query.device)
    filled = torch.full_like(slot[:1], capacity) if tail is None else tail.long()
    stored = slot < filled
    if tail is not None:
        # whatever is there, times a weight of zero is nothing
        values = values.masked_fill(~stored[:, None], 0)
    own = slot <= filled - q + torch.arange(q, device=query.device)[:, None]
    # of every part its keys, values, which of them there are, which of those queries see without a mask, and its first column
    parts = [(keys, values, stored[None], own, -capacity)]
    if flat is not None:
        made = _padded(flat.keys, flat.values, flat.cu_lengths, hkv, flat.width)
        parts.insert(0, (*made, made[2], -capacity - flat.width))
    if pages is not None:
        lengths = pages.lengths()
        bounds = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        made = _padded(*pages.decoded(), bounds, hkv, int(lengths.max()))
        parts.insert(0, (*made, made[2], 0))
    ks, vs, seen = [], [], []
    for k, v, there, without, column in parts:
        mask = without
        if visible is not None:
            begin = column % visible.shape[3] if k.shape[2] else 0
            mask = visible[..., begin : begin + k.shape[2]] & there
        ks.append(k[:, :, None])
        vs.append(v[:, :, None])
        seen.append(mask.expand(b, hkv, q, -1)[:, :, None])
    rows = query.reshape(b, hkv, hq // hkv, q, d)
    out, lse = _softmax_attention(rows, torch.cat(ks, 3), torch.cat(vs, 3), scaling, torch.cat(seen, 4))
    return out.view(b, hq, q, -1), lse.view(b, hq, q)


def _padded(keys: Tensor, values: Tensor, bounds: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flat keys and values as ``[B, heads, width, D]``, short heads followed by zeros, and where there are any, ``[B, heads, 1,
    width]`` bool."""
    at = bounds[:-1, None] + torch.arange(width, device=keys.device)
    there = at < bounds[1:, None]
    # one row more than there is stands for what is padded
    at = at.masked_fill(~there, len(keys)).view(-1, heads, width)
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1))[at] for x in (keys, values))
    return keys, values, there.view(-1, heads, 1, width)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """``q [..., M, D]``, ``k [..., N, D]``, ``v [..., N, Dv]``, ``seen [..., M, N]``; in float32."""
    logits = (q.float() @ k.float().mT * scaling).masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (p @ v.float()).to(q.dtype), lse
