"""Decode steps that read the cache as it is stored: no head is padded and no page is decoded to be looked at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from mmaccel_kernels.decode import MAX_QUERIES, Flat, decode_attention
from mmaccel_kernels.launch import works
from torch import Tensor

if TYPE_CHECKING:
    from .incoming import Incoming
    from .packed import QuantisedLayer


def on_gpu(x: Tensor) -> bool:
    """Whether the kernel runs on ``x``; the definition would gain nothing over padding."""
    return works(x.device)


def reads_as_stored(layer: Any, incoming: Incoming, new: Tensor) -> bool:
    """Whether a layer is read as stored."""
    if not on_gpu(new) or new.shape[2] > MAX_QUERIES or not incoming.as_stored or incoming.sparse is not None:
        return False
    return layer.ragged is not None or layer.packed


def attend(layer: QuantisedLayer, query: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """Attention of ``query [B, Hq, q, D]`` over everything in ``layer``, the keys of the queries included.

    Parameters
    ----------
    visible : ``[B, 1 or Hkv, q, K]`` bool, over the slots of ``layer.stored()``; None if all are visible.

    Returns
    -------
    ``[B, q, Hq, D]``, as attention functions of transformers return it.
    """
    flat = None
    if (ragged := layer.ragged) is not None:
        bounds = torch.nn.functional.pad(ragged.lengths.flatten().cumsum(0), (1, 0))
        flat = Flat(ragged.keys, ragged.values, bounds, ragged.longest)
    # one kind is read in the same pass as the rest, each of the others in a pass of its own
    kinds = [(pages, width) for pages, width in zip(layer.packs, layer.widths, strict=True) if pages is not None]
    parts, none = [], (layer.keys[:, :, :0], layer.values[:, :, :0])
    for pages, width in kinds[:-1]:
        mine = None
        if visible is not None:
            mine, visible = visible[..., :width], visible[..., width:]
        if len(pages.table):
            parts.append(decode_attention(query, *none, scaling=scaling, pages=pages, visible=mine))
    last = kinds[-1][0] if kinds else None
    read = decode_attention(query, layer.keys, layer.values, scaling=scaling, flat=flat, pages=last, visible=visible)
    return merged([*parts, read]).transpose(1, 2)


def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over several sets of keys as one: outputs ``[B, Hq, q, Dv]`` of each set by their logarithms of the sum of
    exponentials ``[B, Hq, q]`` float32, of which one at least is finite for every query that sees anything."""
    if len(parts) == 1:
        return parts[0][0]
    total = torch.stack([lse for _, lse in parts])
    share = (total - total.amax(0).clamp(min=torch.finfo(total.dtype).min)).exp()
    share = share / share.sum(0).clamp(min=torch.finfo(total.dtype).tiny)
    return torch.stack([out.float() for out, _ in parts]).mul(share[..., None]).sum(0).to(parts[0][0].dtype)
