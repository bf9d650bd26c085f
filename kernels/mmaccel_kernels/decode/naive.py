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
    width: int = 0


def decode_attention_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: Flat | None = None,
    pages: Pages | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`.decode_attention` means, in plain torch; for any number of queries and any pages."""
    b, hq, q, d = query.shape
    hkv, tail = keys.shape[1:3]
    rows = query.reshape(b, hkv, hq // hkv, q, d)
    causal = torch.ones(q, tail, dtype=torch.bool, device=query.device).tril(tail - q)
    if flat is None and pages is None:
        seen = causal if visible is None else visible[:, :, None]
        out, lse = _softmax_attention(rows, keys[:, :, None], values[:, :, None], scaling, seen)
        return out.view(b, hq, q, -1), lse.view(b, hq, q)
    parts = []
    if pages is not None:
        parts.append((*pages.decoded(), [0, *pages.lengths().flatten().cumsum(0).tolist()], 0))
    if flat is not None:
        parts.append((flat.keys, flat.values, flat.cu_lengths.tolist(), -tail - flat.width))
    outs, lses = [], []
    for i in range(b * hkv):
        at = divmod(i, hkv)
        own = [(k[cu[i] : cu[i + 1]], v[cu[i] : cu[i + 1]], column) for k, v, cu, column in parts]
        k = torch.cat([*(part[0].float() for part in own), keys[at].float()])
        v = torch.cat([*(part[1].float() for part in own), values[at].float()])
        if visible is None:
            seen = torch.cat([causal.new_ones(q, len(k) - tail), causal], dim=1)
        else:
            mask = visible[at[0], at[1] % visible.shape[1]]
            begin = [(column % mask.shape[1], len(part)) for part, _, column in own] + [(mask.shape[1] - tail, tail)]
            seen = torch.cat([mask[:, column : column + n] for column, n in begin], dim=1)
        out, lse = _softmax_attention(rows[at], k, v, scaling, seen)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs).view(b, hq, q, -1), torch.stack(lses).view(b, hq, q)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """``q [..., M, D]``, ``k [..., N, D]``, ``v [..., N, Dv]``, ``seen [..., M, N]``; in float32."""
    logits = (q.float() @ k.float().mT * scaling).masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (p @ v.float()).to(q.dtype), lse
