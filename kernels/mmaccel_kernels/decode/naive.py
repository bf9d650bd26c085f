"""Decode attention in plain torch: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..pages import Pages


class Flat(NamedTuple):
    """Heads that store different counts, one after the other.

    keys : ``[total, D]``; rows that no head owns are room to spare and never looked at.
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
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Definition of :func:`.decode_attention` in plain torch; for any number of queries and any pages."""
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
        made = _unpacked(pages)
        parts.insert(0, (*made, made[2], 0))
    rows, logits = query.reshape(b, hkv, hq // hkv * q, d).float(), []
    for place, (k, _, there, without, column) in enumerate(parts):
        mask = without
        if visible is not None:
            begin = column % visible.shape[3] if k.shape[2] else 0
            mask = visible[..., begin : begin + k.shape[2]] & there
        found = (rows @ k.float().mT * scaling).view(b, hkv, hq // hkv, q, -1)
        if added is not None and pages is not None and place == 0:
            found = found + added[..., : k.shape[2]].view(b, hkv, hq // hkv, q, -1) * scaling
        logits.append(found.masked_fill(~mask.expand(b, hkv, q, -1)[:, :, None], -torch.inf))
    every = torch.cat(logits, dim=-1)
    lse = every.logsumexp(-1)
    p = (every - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp().flatten(2, 3)
    shares = p.split([part.shape[-1] for part in logits], dim=-1)
    out = torch.stack([share @ v.float() for share, (_, v, *_) in zip(shares, parts, strict=True)]).sum(0)
    return out.to(query.dtype).view(b, hq, q, -1), lse.view(b, hq, q)


def _unpacked(pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_padded`, of what pages hold."""
    lengths, (keys, values) = pages.lengths(), pages.decoded()
    width = int(lengths.max())
    if len(keys) < lengths.numel() * width:
        bounds = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        return _padded(keys, values, bounds, pages.heads, width)
    # all heads are as long
    keys, values = (x.view(*lengths.shape, width, x.shape[1]) for x in (keys, values))
    return keys, values, torch.ones(1, 1, 1, width, dtype=torch.bool, device=keys.device)


def _padded(keys: Tensor, values: Tensor, bounds: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flat keys and values as ``[B, heads, width, D]``, short heads followed by zeros, and where there are any, ``[B, heads, 1,
    width]`` bool."""
    at = bounds[:-1, None] + torch.arange(width, device=keys.device)
    there = at < bounds[1:, None]
    # an extra row of zeros serves as padding
    at = at.masked_fill(~there, len(keys)).view(-1, heads, width)
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1))[at] for x in (keys, values))
    return keys, values, there.view(-1, heads, 1, width)
