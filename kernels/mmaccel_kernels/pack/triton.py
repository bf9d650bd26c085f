"""Quantising as a Triton program: a program packs a block of channels of one page."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import enqueue
from ..pages import Format, Plane
from .naive import Shared

#: channels a program packs where every channel has its own range
_CHANNELS = 64


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
    """:func:`.quantise` in one launch."""
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
            _quantise, grid,
            x, x.stride(0), start, count, codes, scale, scale if zero is None else zero, meta, width,
            **each, num_warps=4,
        )  # fmt: skip
    return Plane(format, codes, scale, zero)


def constants(format: Format, page: int, tile: int, width: int, shared: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel."""
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
        "INTERLEAVED": format.interleaved(width),
        "SHARED": shared,
        "BOOK": format.book,
        "HALF": len(format.book),
        "CORRECTED": format.corrected,
    }


@jit
def _rounded(x):
    """Half to even, for numbers from 0 to 2^22."""
    return (x + 8388608.0) - 8388608.0


@jit
def _e4m3(x):
    """The bytes of :func:`.naive.to_e4m3`."""
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
    elif CODE == "sign" or LEVELS == 3:
        scale = tl.div_rn(size, zero + tl.maximum(members, 1)) * (2.0 if CODE == "sign" else 1.0)
    else:
        zero = tl.where(low <= high, low, 0.0)
        scale = tl.div_rn(tl.where(low <= high, high - low, 0.0), tl.zeros_like(size) + (LEVELS - 1))
    return scale, zero


@jit
def _kept(pointer, value, mask, MOST: tl.constexpr):
    """Store in the type of the pointer as :func:`.naive.kept` says, and go on with what was stored."""
    if pointer.dtype.element_ty == tl.float16:
        value = tl.minimum(tl.maximum(value, -MOST), MOST)
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer, value, mask=mask)
    return value.to(tl.float32)


@jit
def _code(x, scale, zero, CODE: tl.constexpr, LEVELS: tl.constexpr):
    """The codes of ``x``."""
    if CODE == "sign":
        code = (x >= 0).to(tl.int32)
    elif LEVELS == 3:
        code = 1 + (x > scale * 0.5).to(tl.int32) - (x < scale * -0.5).to(tl.int32)
    else:
        x = tl.where(scale > 0, tl.div_rn(x - zero, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x)), 0.0)
        if CODE == "fp8":
            code = _e4m3(x)
        else:
            code = _rounded(tl.minimum(tl.maximum(x, 0.0), LEVELS - 1.0)).to(tl.int32)
    return code


@jit
def _by_book(x, known, members: tl.constexpr, BOOK: tl.constexpr, HALF: tl.constexpr, CORRECTED: tl.constexpr):
    """Codes and scales of tokens ``x [TILE, BLOCK]`` as :func:`.naive.by_book` says."""
    mean = tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), tl.zeros([x.shape[0]], tl.float32) + members))
    size = tl.div_rn(tl.abs(x), tl.where(mean > 0, mean, 1.0)[:, None] + tl.zeros_like(x))
    rank = tl.zeros(x.shape, tl.int32)
    level = tl.full(x.shape, BOOK[0], tl.float32)
    for k in tl.static_range(1, HALF):
        above = size >= (BOOK[k - 1] + BOOK[k]) / 2
        rank, level = tl.where(above, k, rank), tl.where(above, BOOK[k], level)
    scale = mean
    if CORRECTED:
        squares = tl.sum(tl.where(known, level * level, 0.0), 1)
        length = tl.sqrt_rn(tl.div_rn(squares, tl.zeros_like(squares) + members))
        scale = tl.where(length > 0, tl.div_rn(mean, tl.where(length > 0, length, 1.0)), 0.0)
    return rank + (x < 0).to(tl.int32) * HALF, scale


@jit
def _of_group(
    value, known, source, row_stride, first, members, inside,
    CODE: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scales and zero points, ``[BLOCK]`` each, of the channels in the group of tokens that begins with the tile ``value``:
    its other tiles are looked through."""
    token = tl.arange(0, TILE)
    low, high, size = _figures(value, known, 0, CODE)
    for ahead in range(first + TILE, first + GROUP, TILE):
        mask = (token + ahead < members)[:, None] & inside[None, :]
        part = tl.load(source + ahead * row_stride, mask=mask, other=0.0).to(tl.float32)
        low_, high_, size_ = _figures(part, mask, 0, CODE)
        low, high = tl.minimum(low, low_), tl.maximum(high, high_)
        size = tl.maximum(size, size_) if CODE == "fp8" else size + size_
    in_group = tl.minimum(tl.maximum(members - first, 0), GROUP)
    return _scales(low, high, size, in_group, CODE, LEVELS)


@jit
def _given(scale, zero, place, mask, AFFINE: tl.constexpr):
    """Scales and zero points that are known already."""
    step = tl.load(scale + place, mask=mask, other=0.0).to(tl.float32)
    return step, tl.load(zero + place, mask=mask & AFFINE, other=0.0).to(tl.float32)


@jit
def _measured(scale, zero, place, step, offset, mask, AFFINE: tl.constexpr, MOST: tl.constexpr):
    """Store scales and zero points, and go on with them as they are stored: codes are the best for those."""
    return _kept(scale + place, step, mask, MOST), _kept(zero + place, offset, mask & AFFINE, 65504.0)


@jit
def _quantise(
    x, row_stride, start, count, codes, scale, zero, meta, width,
    CODE: tl.constexpr, DIGITS: tl.constexpr, LEVELS: tl.constexpr, AFFINE: tl.constexpr, PER_CHANNEL: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHARED: tl.constexpr, BOOK: tl.constexpr, HALF: tl.constexpr, CORRECTED: tl.constexpr,
):  # fmt: skip
    """A block of channels of one page."""
    BLOCKS: tl.constexpr = (PAGE // TILE + DIGITS - 1) // DIGITS
    # rows of bytes of a page; codes of three bits have their lower two before the others
    TWO: tl.constexpr = (PAGE // TILE + 3) // 4 if LEVELS == 8 else 0
    page = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < CHANNELS) & (channel < width)
    token = tl.arange(0, TILE)
    members = tl.load(count + page)
    row = tl.load(meta + page).to(tl.int64) if SHARED else page
    source = x + (tl.load(start + page) + token[:, None]) * row_stride + channel[None, :]
    position = channel
    if INTERLEAVED:
        position = channel // (GROUP // 8) % 8 * (width // 8) + channel // GROUP * (GROUP // 8) + channel % (GROUP // 8)
    target = codes + (page * (BLOCKS + TWO) * TILE + token[:, None]) * width + position[None, :]
    step = tl.zeros([BLOCK if PER_CHANNEL else TILE], tl.float32)
    offset = tl.zeros_like(step)

    for block in range(BLOCKS):
        byte = tl.zeros([TILE, BLOCK], tl.int32)
        lower = tl.zeros([TILE, BLOCK], tl.int32)
        for digit in range(DIGITS):
            first = (block * DIGITS + digit) * TILE
            known = (token + first < members)[:, None] & inside[None, :]
            value = tl.load(source + first * row_stride, mask=known, other=0.0).to(tl.float32)
            if PER_CHANNEL:
                if (first % GROUP == 0) & (first < PAGE):
                    place = (row * (PAGE // GROUP) + first // GROUP) * width + channel
                    if SHARED:
                        step, offset = _given(scale, zero, place, inside, AFFINE)
                    else:
                        step, offset = _of_group(
                            value, known, source, row_stride, first, members, inside, CODE, LEVELS, GROUP, TILE
                        )
                        step, offset = _measured(scale, zero, place, step, offset, inside, AFFINE, 65504.0)
                code = _code(value, step[None, :], offset[None, :], CODE, LEVELS)
            else:
                place = (row * PAGE + first + token) * (width // CHANNELS) + tl.program_id(1)
                whole = token + first < PAGE
                if HALF:
                    code, step = _by_book(value, known, CHANNELS, BOOK, HALF, CORRECTED)
                    _kept(scale + place, step, whole, 1023.5)
                elif SHARED:
                    step, offset = _given(scale, zero, place, whole, AFFINE)
                else:
                    low, high, size = _figures(value, known, 1, CODE)
                    step, offset = _scales(low, high, size, CHANNELS, CODE, LEVELS)
                    step, offset = _measured(scale, zero, place, step, offset, whole, AFFINE, 1023.5)
                if HALF == 0:
                    code = _code(value, step[:, None], offset[:, None], CODE, LEVELS)
            code = tl.where(known, code, 0)
            if LEVELS == 8:
                byte += (code >> 2) << digit
                lower += (code & 3) << (digit % 4 * 2)
                if (digit % 4 == 3) & (block * 2 + digit // 4 < TWO):
                    tl.store(target + (block * 2 + digit // 4) * TILE * width, lower.to(tl.uint8), mask=inside[None, :])
                if digit % 4 == 3:
                    lower = tl.zeros_like(lower)
            elif CODE == "ternary":
                byte = byte * 3 + code
            else:
                byte += code << (digit * (8 // DIGITS))
        if CODE == "ternary":
            byte = (byte * 256 + 242) // 243
        tl.store(target + (TWO + block) * TILE * width, byte.to(tl.uint8), mask=inside[None, :])
