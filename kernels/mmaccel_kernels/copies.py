"""Vectors that are equal to the bit are one candidate: they tie, whatever a product of matrices rounds.

A product of matrices may round its entries differently by shape and by column, so that a vector and its copy come out a bit
apart, another way in a batch than alone. What picks or pairs vectors therefore takes every product of a copy from the first
vector that is equal to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: entries looked at once: on a CPU they stay in the cache of a core, on a GPU what is made of them takes little memory
CACHED, BLOCK = 1 << 18, 1 << 23
#: odd numbers without a pattern (of the generator splitmix64), as signed
_STEP, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def first_copies(x: Tensor, among: Tensor | None = None) -> Tensor | None:
    """``[N, n]`` long: the first slot whose vector in ``x [N, n, D]`` is equal to the one in each slot; None where a CPU finds
    no copy.

    Zeros are equal whatever their sign; what is not finite equals nothing. Found by a hash of the bits in whole numbers and a
    sort, and checked entry by entry: the same on every machine, and nothing is fetched from a GPU.

    Parameters
    ----------
    x : float16, bfloat16 or float32.
    among : ``[N, n]`` bool; a slot outside is the copy of none, and none is its copy. By default all.
    """
    own = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    if not x.numel():
        return None
    factor = torch.arange(1, x.shape[2] + 1, device=x.device) * _STEP
    factor = (factor ^ (factor >> 29)) * _MIX
    low, high = factor.int(), (factor >> 32).int()
    codes, flat = [], x.flatten(0, 1)
    for part in _blocks(flat):
        bits = (flat[part].float() + 0.0).view(torch.int32)
        # sums of 32 bits that wrap; the upper half for itself, as the lower one of what was in half precision is empty
        words = (bits * low).sum(-1, dtype=torch.int32), ((bits >> 16) * high).sum(-1, dtype=torch.int32)
        codes.append((words[0].long() << 32) + words[1])
    code = torch.cat(codes).view(own.shape)
    if among is not None:
        code = torch.where(among, code, own)
    code, order = code.sort(dim=1, stable=True)
    begins = torch.nn.functional.pad(code[:, 1:] != code[:, :-1], (1, 0), value=True)
    first = order.gather(1, torch.where(begins, own, 0).cummax(1).values)
    first = torch.empty_like(first).scatter_(1, order, first)
    # a GPU is not asked, which would be to wait for it
    if x.device.type == "cpu" and torch.equal(first, own):
        return None
    return torch.where(equal_rows(x, x, first), first, own)


def equal_rows(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """``[N, n]`` bool: whether the vectors of ``x [N, n, D]`` are those of ``y [N, m, D]`` at ``at [N, n]``."""
    row = torch.arange(len(x), device=x.device)[:, None]
    flat, other, place = x.flatten(0, 1), y.flatten(0, 1), (at + row * y.shape[1]).flatten()
    # a difference is zero only between equals, and quicker on a CPU than a comparison
    same = [(flat[part] - other[place[part]]).abs().amax(-1) == 0 for part in _blocks(flat)]
    return torch.cat(same).view(at.shape) if same else torch.ones_like(at, dtype=torch.bool)


def of_first(figures: Tensor, first: Tensor | None) -> Tensor:
    """``figures [N, n]`` with those of copies taken from the ``first [N, n]``."""
    return figures if first is None else figures.gather(1, first)


def pairs_of_first(pairs: Tensor, first: Tensor | None, itself: float | None = None) -> Tensor:
    """``pairs [N, n, n]`` with rows and columns of copies taken from the ``first [N, n]``, and ``itself`` between them."""
    if first is not None:
        number = torch.arange(len(pairs), device=pairs.device)[:, None]
        pairs = pairs[number, first].gather(2, first[:, None].expand(pairs.shape))
    if itself is None:
        return pairs
    if first is None:
        pairs.diagonal(dim1=1, dim2=2).fill_(itself)
        return pairs
    return pairs.masked_fill_(first[:, :, None] == first[:, None], itself)


def _blocks(x: Tensor) -> list[slice]:
    """Stretches of the vectors ``x [m, D]``."""
    size = max(1, (CACHED if x.device.type == "cpu" else BLOCK) // max(1, x.shape[1]))
    return [slice(start, start + size) for start in range(0, len(x), size)]
