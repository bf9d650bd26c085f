"""Quantise and pack: full-precision tokens become the codes and scales of pages, in one launch over all heads.

The range of a group is what its tokens span, measured in float32 and rounded to the type the scales are stored in *before*
codes are chosen, so that codes are the best for the scales that will be used with them. A group whose numbers are all equal
has scale 0 and decodes to that number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._triton import jit, tl, triton
from .launch import enqueue, run
from .pages import FP8_MAX, Format, Plane, grouped, pack, waves

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: channels a program packs where every channel has its own range
_CHANNELS = 64


class Shared(NamedTuple):
    """Scales that are known already, one row for several pages: ``[M, *format.meta]`` each, ``meta [N]`` int32."""

    scale: Tensor
    zero: Tensor | None
    meta: Tensor


def quantise(
    x: Tensor,
    start: Tensor,
    count: Tensor,
    format: Format,
    *,
    page: int,
    tile: int,
    meta_dtype: torch.dtype | None = None,
    shared: Shared | None = None,
) -> Plane:
    """Pages of ``x``; by the kernel on a GPU, else by the definition.

    Parameters
    ----------
    x : ``[total, D]`` float16, bfloat16 or float32; the stride along D is 1.
    start, count : ``[N]`` long and int32: page ``n`` holds rows ``start[n]`` to ``start[n] + count[n] - 1``, from 1 to
        ``page`` of them.
    meta_dtype : of the scales; by default that of ``x``.
    shared : scales to use instead of measuring; they are the scales of the result.

    Raises
    ------
    ValueError
        If shapes, types or devices do not fit, or the format does not fit the page.
    """
    _check(x, start, count, format, page, tile, shared)
    meta_dtype = meta_dtype or x.dtype
    x = waves(x) if format.fourier else x
    return run(quantise_kernel, quantise_definition, x, start, count, format, page, tile, meta_dtype, shared)


def _check(
    x: Tensor, start: Tensor, count: Tensor, format: Format, page: int, tile: int, shared: Shared | None
) -> None:
    if x.dim() != 2 or x.dtype not in _DTYPES or (x.numel() and x.stride(1) != 1):
        raise ValueError(
            f"x must be [total, D] float16, bfloat16 or float32 with stride 1 along D, not {x.dtype} {tuple(x.shape)}."
        )
    format.check(page, tile, x.shape[1])
    if tile & (tile - 1):
        raise ValueError(f"tile must be a power of 2, not {tile}.")
    if start.dtype != torch.int64 or count.dtype != torch.int32 or start.dim() != 1 or start.shape != count.shape:
        raise ValueError(
            f"start and count must be [N] long and int32, not {start.dtype} {tuple(start.shape)} and {count.dtype} "
            f"{tuple(count.shape)}."
        )
    if not x.device == start.device == count.device:
        raise ValueError(f"x is on {x.device}, start on {start.device} and count on {count.device}.")
    if shared is not None:
        want = format.meta(page, x.shape[1])
        if shared.scale.shape[1:] != want or shared.meta.shape != start.shape:
            raise ValueError(
                f"shared scales must be [M, {', '.join(map(str, want))}] and meta [{len(start)}], not "
                f"{tuple(shared.scale.shape)} and {tuple(shared.meta.shape)}."
            )
        if (shared.zero is not None) != format.affine or (
            shared.zero is not None and shared.zero.shape != shared.scale.shape
        ):
            raise ValueError(
                f"Code {format.code!r} {'needs zero points like its' if format.affine else 'has only'} scales."
            )


# --- the definition ---------------------------------------------------------------------------------------------------
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
    """What :func:`quantise` means, in plain torch."""
    token = torch.arange(page, device=x.device)
    there = token < count[:, None]
    rows = x[torch.where(there, start[:, None] + token, 0)].float()
    if shared is None:
        scale, zero = measure(rows, there, format)
        scale, zero = scale.to(meta_dtype), None if zero is None else zero.to(meta_dtype)
        own_scale, own_zero = scale, zero
    else:
        scale, zero, meta = shared.scale, shared.zero, shared.meta.long()
        own_scale, own_zero = scale[meta], None if zero is None else zero[meta]
    codes = encode(rows, format, own_scale, own_zero)
    return Plane(format, pack(codes.masked_fill(~there[..., None], 0), format, tile), scale, zero)


def measure(x: Tensor, there: Tensor, format: Format) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every group.

    ``int``: ``(max - min) / (levels - 1)`` and ``min``. ``ternary``: ``mean |x|``. ``sign``: ``2 mean |x|``.
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
        return (high - low) / (format.levels - 1), low
    size = x.abs().masked_fill(~there, 0.0)
    if format.code == "fp8":
        return size.amax(over) / FP8_MAX, None
    mean = size.sum(over) / there.sum(over).clamp(min=1)
    return (2 * mean if format.code == "sign" else mean), None


def encode(x: Tensor, format: Format, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The code of every number, rounded half to even: ``x [N, page, D]`` float32 -> the same shape, int32."""
    axis = 2 if format.axis == "channel" else 3
    s, y = scale.float().unsqueeze(axis), grouped(x, format)
    if format.code == "sign":
        codes = (y >= 0).int()
    elif format.code == "ternary":
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


# --- the kernel -------------------------------------------------------------------------------------------------------
def quantise_kernel(
    x: Tensor,
    start: Tensor,
    count: Tensor,
    format: Format,
    page: int,
    tile: int,
    meta_dtype: torch.dtype,
    shared: Shared | None = None,
) -> Plane:
    """:func:`quantise` in one launch: a program packs a block of channels of one page."""
    n, width = len(start), x.shape[1]
    codes = torch.empty(n, format.rows(page, tile), width, dtype=torch.uint8, device=x.device)
    if shared is None:
        scale = torch.empty(n, *format.meta(page, width), dtype=meta_dtype, device=x.device)
        zero = torch.empty_like(scale) if format.affine else None
        meta = None
    else:
        scale, zero, meta = shared.scale.contiguous(), shared.zero, shared.meta
        zero = None if zero is None else zero.contiguous()
    if n and width:
        each = constants(format, page, tile, width, shared is not None)
        grid = (n, triton.cdiv(width, each["CHANNELS"]))
        enqueue(
            _quantise,
            grid,
            x,
            x.stride(0),
            start,
            count,
            codes,
            scale,
            scale if zero is None else zero,
            meta,
            width,
            **each,
            num_warps=4,
        )
    return Plane(format, codes, scale, zero)


def constants(format: Format, page: int, tile: int, width: int, shared: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    per_channel = format.axis == "channel"
    channels = min(_CHANNELS, triton.next_power_of_2(width)) if per_channel else format.group
    return {
        "CODE": format.code,
        "DIGITS": format.digits,
        "LEVELS": format.levels,
        "AFFINE": format.affine,
        "PER_CHANNEL": per_channel,
        "GROUP": format.group,
        "PAGE": page,
        "TILE": tile,
        "CHANNELS": channels,
        "BLOCK": triton.next_power_of_2(channels),
        "SHARED": shared,
    }


@jit
def _rounded(x):
    """Half to even, for numbers from 0 to 2^22."""
    return (x + 8388608.0) - 8388608.0


@jit
def _e4m3(x):
    """The bytes of :func:`to_e4m3`."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    code = tl.where(size < 0.015625, _rounded(size * 512.0).to(tl.int32), normal)
    return code | tl.where(x < 0, 128, 0)


@jit
def _figures(x, known, AXIS: tl.constexpr, CODE: tl.constexpr):
    """Least, most, and the sum (fp8: the most) of the sizes of the numbers that are known."""
    low = tl.min(tl.where(known, x, float("inf")), AXIS)
    high = tl.max(tl.where(known, x, float("-inf")), AXIS)
    size = tl.max(tl.abs(x), AXIS) if CODE == "fp8" else tl.sum(tl.abs(x), AXIS)
    return low, high, size


@jit
def _scales(low, high, size, members, CODE: tl.constexpr, LEVELS: tl.constexpr):
    """Scale and zero point of a group of ``members`` tokens from its figures."""
    zero = tl.zeros_like(size)
    if CODE == "fp8":
        scale = tl.div_rn(size, zero + 448.0)
    elif CODE == "sign" or CODE == "ternary":
        scale = tl.div_rn(size, zero + tl.maximum(members, 1)) * (2.0 if CODE == "sign" else 1.0)
    else:
        zero = tl.where(low <= high, low, 0.0)
        scale = tl.div_rn(tl.where(low <= high, high - low, 0.0), tl.zeros_like(size) + (LEVELS - 1))
    return scale, zero


@jit
def _kept(pointer, value, mask):
    """Store in the type of the pointer, and go on with what was stored."""
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer, value, mask=mask)
    return value.to(tl.float32)


@jit
def _code(x, scale, zero, CODE: tl.constexpr, LEVELS: tl.constexpr):
    """The codes of ``x``."""
    if CODE == "sign":
        code = (x >= 0).to(tl.int32)
    elif CODE == "ternary":
        code = 1 + (x > scale * 0.5).to(tl.int32) - (x < scale * -0.5).to(tl.int32)
    else:
        x = tl.where(scale > 0, tl.div_rn(x - zero, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x)), 0.0)
        if CODE == "fp8":
            code = _e4m3(x)
        else:
            code = _rounded(tl.minimum(tl.maximum(x, 0.0), LEVELS - 1.0)).to(tl.int32)
    return code


@jit
def _quantise(
    x,
    row_stride,
    start,
    count,
    codes,
    scale,
    zero,
    meta,
    width,
    CODE: tl.constexpr,
    DIGITS: tl.constexpr,
    LEVELS: tl.constexpr,
    AFFINE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    BLOCKS: tl.constexpr = (PAGE // TILE + DIGITS - 1) // DIGITS
    page = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < CHANNELS) & (channel < width)
    token = tl.arange(0, TILE)
    members = tl.load(count + page)
    row = tl.load(meta + page).to(tl.int64) if SHARED else page
    source = x + (tl.load(start + page) + token[:, None]) * row_stride + channel[None, :]
    target = codes + (page * BLOCKS * TILE + token[:, None]) * width + channel[None, :]
    step = tl.zeros([BLOCK if PER_CHANNEL else TILE], tl.float32)
    offset = tl.zeros_like(step)

    for block in range(BLOCKS):
        byte = tl.zeros([TILE, BLOCK], tl.int32)
        for digit in range(DIGITS):
            first = (block * DIGITS + digit) * TILE
            known = (token + first < members)[:, None] & inside[None, :]
            value = tl.load(source + first * row_stride, mask=known, other=0.0).to(tl.float32)
            if PER_CHANNEL:
                if (first % GROUP == 0) & (first < PAGE):
                    place = (row * (PAGE // GROUP) + first // GROUP) * width + channel
                    if SHARED:
                        step = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
                        offset = tl.load(zero + place, mask=inside & AFFINE, other=0.0).to(tl.float32)
                    else:
                        # a group begins: look through all of it
                        low, high, size = _figures(value, known, 0, CODE)
                        for ahead in range(first + TILE, first + GROUP, TILE):
                            mask = (token + ahead < members)[:, None] & inside[None, :]
                            part = tl.load(source + ahead * row_stride, mask=mask, other=0.0).to(tl.float32)
                            low_, high_, size_ = _figures(part, mask, 0, CODE)
                            low, high = tl.minimum(low, low_), tl.maximum(high, high_)
                            size = tl.maximum(size, size_) if CODE == "fp8" else size + size_
                        in_group = tl.minimum(tl.maximum(members - first, 0), GROUP)
                        step, offset = _scales(low, high, size, in_group, CODE, LEVELS)
                        step = _kept(scale + place, step, inside)
                        offset = _kept(zero + place, offset, inside & AFFINE)
                code = _code(value, step[None, :], offset[None, :], CODE, LEVELS)
            else:
                place = (row * PAGE + first + token) * (width // CHANNELS) + tl.program_id(1)
                whole = token + first < PAGE
                if SHARED:
                    step = tl.load(scale + place, mask=whole, other=0.0).to(tl.float32)
                    offset = tl.load(zero + place, mask=whole & AFFINE, other=0.0).to(tl.float32)
                else:
                    low, high, size = _figures(value, known, 1, CODE)
                    step, offset = _scales(low, high, size, CHANNELS, CODE, LEVELS)
                    step = _kept(scale + place, step, whole)
                    offset = _kept(zero + place, offset, whole & AFFINE)
                code = _code(value, step[:, None], offset[:, None], CODE, LEVELS)
            code = tl.where(known, code, 0)
            byte = byte * 3 + code if CODE == "ternary" else byte + (code << (digit * (8 // DIGITS)))
        if CODE == "ternary":
            byte = (byte * 256 + 242) // 243
        tl.store(target + block * TILE * width, byte.to(tl.uint8), mask=inside[None, :])
