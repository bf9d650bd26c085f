"""Decode attention over ragged heads on a CPU: each head is read where it is stored, and nothing is padded."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import Flat

#: keys of a head, in the mean over heads, from which on a call for each head costs less than padding
LEAST = 32


def reads_heads(new: Tensor, keys: Tensor, values: Tensor, heads: int) -> bool:
    """Whether :func:`heads_attention` serves one new token, ``new [B, any, 1, D]``, over flat keys and values ``[total, D]`` of
    so many ``heads`` of all rows: on a CPU, in float32, where heads are long."""
    if new.device.type != "cpu" or new.dtype != torch.float32 or new.shape[2] != 1:
        return False
    return len(keys) >= LEAST * heads and keys.shape == values.shape and keys.dtype == new.dtype


def heads_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float, flat: Flat) -> tuple[Tensor, Tensor]:
    """:func:`.decode_attention` of one query without a mask, over the heads of ``flat`` and the tail behind them."""
    (b, hq, _, d), hkv = query.shape, keys.shape[1]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows, bounds = query.view(b, hkv, -1, d), flat.cu_lengths.tolist()
    tail, tail_lse = attend(rows, keys, values, scale=scaling)
    lengths = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    own = [x[: bounds[-1]].view(1, 1, bounds[-1], d).split(lengths, 2) for x in (flat.keys, flat.values)]
    parts = []
    for q, k, v in zip(rows.view(b * hkv, 1, 1, -1, d).unbind(), *own, strict=True):
        if k.shape[2]:
            parts.append(attend(q, k, v, scale=scaling))
        else:
            parts.append((torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)))
    out, lse = (torch.cat(x).view(b, hkv, *x[0].shape[2:]) for x in zip(*parts, strict=True))
    # by the share of the tail
    read = torch.lerp(out, tail, (tail_lse - lse).sigmoid()[..., None])
    return read.reshape(b, hq, 1, d), torch.logaddexp(lse, tail_lse).reshape(b, hq, 1)
