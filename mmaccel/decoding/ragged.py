"""Left padding of a batch whose rows grow by different numbers of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def pad_left(x: Tensor, start: Tensor, length: Tensor, dim: int = 1) -> Tensor:
    """Move ``length[i]`` entries of row ``i``, from ``start[i]`` on, to its end, and fill what is before with zeros.

    Parameters
    ----------
    x : ``[B, ...]``: token ids, masks, keys or values.
    start, length : ``[B]`` int64, places along ``dim``.
    dim : the axis of tokens. It has ``length.max()`` entries afterwards.
    """
    width = int(length.max())
    place = torch.arange(width, device=x.device) - (width - length)[:, None]
    shape = [len(x), *(width if axis == dim % x.dim() else 1 for axis in range(1, x.dim()))]
    source, padding = (start[:, None] + place.clamp(min=0)).view(shape), (place < 0).view(shape)
    moved = x.gather(dim, source.expand(*x.shape[: dim % x.dim()], width, *x.shape[dim % x.dim() + 1 :]))
    return moved.masked_fill(padding, 0)
