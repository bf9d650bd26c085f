"""Quantising in plain torch: the definition."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..pages import FP8_MAX, Format, Plane, grouped, pack


class Shared(NamedTuple):
    """Scales that are known already, one row for several pages: ``[M, *format.meta]`` each, ``meta [N]`` int32."""

    scale: Tensor
    zero: Tensor | None
    meta: Tensor


#: the largest scale of a token in float16: what weighs it is lifted by 64 in the loop over pages, and stays a number
SCALE_MAX = 1023.5


def quantise_definition(
    x: Tensor,
    start: Tensor,
    count: Tensor,
    format: Format,
    page: int,
    tile: int,
    meta_dtype: torch.dtype,
    shared: Shared | None = None,
) -> Plane:
    """Definition of :func:`.quantise` in plain torch."""
    token = torch.arange(page, device=x.device)
    there = token < count[:, None]
    rows = x[torch.where(there, start[:, None] + token, 0)].float()
    if format.by_book:
        codes, scale = by_book(rows, format)
        scale = kept(scale * there[..., None], meta_dtype, SCALE_MAX)
        return Plane(format, pack(codes.masked_fill(~there[..., None], 0), format, tile), scale, None)
    if shared is None:
        scale, zero = measure(rows, there, format)
        scale = kept(scale, meta_dtype, SCALE_MAX if format.axis == "token" else torch.inf)
        zero = None if zero is None else kept(zero, meta_dtype)
        own_scale, own_zero = scale, zero
    else:
        scale, zero, meta = shared.scale, shared.zero, shared.meta.long()
        own_scale, own_zero = scale[meta], None if zero is None else zero[meta]
    codes = encode(rows, format, own_scale, own_zero)
    return Plane(format, pack(codes.masked_fill(~there[..., None], 0), format, tile), scale, zero)


def meta_type(dtype: torch.dtype) -> torch.dtype:
    """In what scales of numbers of a type are stored: float16 for those of 16 bits, which has more digits than bfloat16 and is
    what kernels multiply in."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def kept(x: Tensor, dtype: torch.dtype, most: float = torch.inf) -> Tensor:
    """Scales or zero points as they are stored: those that the type cannot hold are its largest numbers, or ``most`` where
    that is float16."""
    largest = min(torch.finfo(dtype).max, most if dtype == torch.float16 else torch.inf)
    return x.clamp(-largest, largest).to(dtype)


def measure(x: Tensor, there: Tensor, format: Format) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every group.

    ``int``: ``(max - min) / (levels - 1)`` and ``min``. ``ternary``, ``three``: ``mean |x|``. ``sign``: ``2 mean |x|``.
    ``fp8``: ``max |x| / 448``.

    Parameters
    ----------
    x : ``[N, page, D]`` float32. there : ``[N, page]`` bool; other tokens do not count.

    Returns
    -------
    ``[N, *format.meta]`` float32 each, 0 for groups without a token; no zero point unless the format is affine.
    """
    x, there = grouped(x, format), grouped(there[..., None].expand(x.shape), format)
    over = 2 if format.axis == "channel" else 3
    if format.affine:
        low = x.masked_fill(~there, torch.inf).amin(over)
        high = x.masked_fill(~there, -torch.inf).amax(over)
        empty = low > high
        low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
        # by a tensor: CUDA multiplies by the inverse of a number, which rounds otherwise
        return (high - low) / torch.full_like(high, format.levels - 1), low
    size = x.abs().masked_fill(~there, 0.0)
    if format.code == "fp8":
        largest = size.amax(over)
        return largest / torch.full_like(largest, FP8_MAX), None
    mean = size.sum(over) / there.sum(over).clamp(min=1)
    return (2 * mean if format.code == "sign" else mean), None


def by_book(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Codes of ``x [N, page, D]`` float32 by the nearest level, and scales ``[N, page, D / group]`` float32: of every group
    of channels what makes the levels as long as the token, or its root mean square. Of two levels as near it is the outer."""
    x = grouped(x, format)
    mean = x.square().mean(-1).sqrt()
    size = x.abs() / torch.where(mean > 0, mean, 1.0)[..., None]
    rank, level = torch.zeros_like(x, dtype=torch.int32), torch.full_like(x, format.book[0])
    for place, (before, own) in enumerate(pairwise(format.book), 1):
        above = size >= (before + own) / 2
        rank, level = torch.where(above, place, rank), torch.where(above, own, level)
    codes = rank + (x < 0).int() * (format.levels // 2)
    scale = mean / level.square().mean(-1).sqrt() if format.corrected else mean
    return codes.flatten(-2), scale


def encode(x: Tensor, format: Format, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The code of every number, rounded half to even: ``x [N, page, D]`` float32 -> the same shape, int32."""
    axis = 2 if format.axis == "channel" else 3
    s, y = scale.float().unsqueeze(axis), grouped(x, format)
    if format.code == "sign":
        codes = (y >= 0).int()
    elif format.levels == 3:
        codes = 1 + (y > s / 2).int() - (y < -s / 2).int()
    elif zero is None:
        codes = to_e4m3(torch.where(s > 0, y / s, 0.0))
    else:
        y = torch.where(s > 0, (y - zero.float().unsqueeze(axis)) / s, 0.0)
        codes = y.clamp(0, format.levels - 1).round().int()
    return codes.reshape(x.shape)


def to_e4m3(x: Tensor) -> Tensor:
    """Bytes of e4m3 numbers, int32: rounded half to even, cut at 448, by whole-number operations."""
    size = x.abs().clamp(max=FP8_MAX)
    bits = size.view(torch.int32)
    # 3 of 23 bits of the mantissa stay, and the exponent counts from -7 instead of -127
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
    # below 2^-6 numbers are multiples of 2^-9
    code = torch.where(size < 2**-6, (size * 512).round().int(), normal)
    return code | torch.where(x < 0, 128, 0).int()
