"""Pages as Triton programs read them, a tile at a time: what :func:`.naive.unpack` and :func:`.naive.dequantise` define.

``PLANE`` is what :func:`plane` says of a plane of keys or values. A code enters a product as the float with the exponent of 128
(bfloat16) or 1024 (float16) and the code as its last bits; what that adds is for the reader to take off, in float32.
"""

from __future__ import annotations

import torch

from .._triton import jit, tl, triton
from .storage import Plane


def plane(of: Plane, dtype: torch.dtype) -> tuple[str, int, bool, int, float, bool, int, int, int, bool]:
    """Compile-time constants of a plane: code, digits, whether channels share scales, group, centre, whether there are zero
    points, width, padded width, what a code becomes more by when it becomes a number of ``dtype``, and whether channels
    are interleaved."""
    form, width = of.format, of.codes.shape[2]
    offset = {torch.bfloat16: 128 if form.levels <= 128 else 0, torch.float16: 1024, torch.float32: 0}[dtype]
    if form.code == "fp8" or form.axis == "token":
        offset = 0
    block = max(16, triton.next_power_of_2(width))
    return (
        form.code,
        form.digits,
        form.axis == "channel",
        form.group,
        form.centre,
        form.affine,
        width,
        block,
        offset,
        form.interleaved(width),
    )


@jit
def digit(word, i: tl.constexpr, PLANE: tl.constexpr):
    """Digit ``i`` of bytes, int32."""
    DIGITS: tl.constexpr = PLANE[1]
    word = word.to(tl.int32)
    if DIGITS == 5:
        return ((word * (3**i) & 255) * 3) >> 8
    elif DIGITS == 1:
        return word
    else:
        return (word >> (i * (8 // DIGITS))) & ((1 << (8 // DIGITS)) - 1)


@jit
def number(digit, DTYPE: tl.constexpr, PLANE: tl.constexpr):
    """Codes as numbers: more than the code by the plane's offset; of fp8, a 256th of its value."""
    CODE: tl.constexpr = PLANE[0]
    OFFSET: tl.constexpr = PLANE[8]
    if CODE == "fp8":
        bits = ((digit & 128) << 8) | ((digit & 127) << 7)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
    elif OFFSET == 1024:
        return (digit | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    elif OFFSET == 128:
        return (digit | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return digit.to(tl.float32).to(DTYPE)


@jit
def words(codes, index, block, PLANE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, stored):
    """``[TILE, BLOCK]`` uint8, the bytes of ``block``; none of tokens that are not stored."""
    DIGITS: tl.constexpr = PLANE[1]
    WIDTH: tl.constexpr = PLANE[6]
    t, d = tl.arange(0, TILE), tl.arange(0, PLANE[7])
    rows: tl.constexpr = (PAGE + TILE * DIGITS - 1) // (TILE * DIGITS) * TILE
    place = d
    if PLANE[9]:
        place = d // (PLANE[3] // 8) % 8 * (WIDTH // 8) + d // PLANE[3] * (PLANE[3] // 8) + d % (PLANE[3] // 8)
    at = codes + index * (rows * WIDTH) + (block * TILE + t)[:, None] * WIDTH + place[None, :]
    # a byte's first digit is its earliest token
    there = ((block * DIGITS * TILE + t) < stored)[:, None] & (d < WIDTH)[None, :]
    return tl.load(at, mask=there, other=0)


@jit
def _meta(scale, zero, at, there, PLANE: tl.constexpr):
    """Scales and zero points in float32."""
    CODE: tl.constexpr = PLANE[0]
    AFFINE: tl.constexpr = PLANE[5]
    factor = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
    added = factor * 0.0
    if AFFINE:
        added = tl.load(zero + at, mask=there, other=0.0).to(tl.float32)
    if CODE == "fp8":
        factor *= 256.0
    return factor, added


@jit
def of_channels(scale, zero, at, group, PLANE: tl.constexpr, PAGE: tl.constexpr):
    """``[BLOCK]`` each: scales and zero points of the channels in a group of tokens."""
    WIDTH: tl.constexpr = PLANE[6]
    d = tl.arange(0, PLANE[7])
    own = (at * (PAGE // PLANE[3]) + group) * WIDTH
    return _meta(scale + own, zero + own, d, d < WIDTH, PLANE)


@jit
def expanded(
    digit, scale, zero, at, group, token, stored, DTYPE: tl.constexpr, PLANE: tl.constexpr, PAGE: tl.constexpr
):
    """``[TILE, BLOCK]``: what the codes of one tile represent, where scales serve no more than it."""
    CODE: tl.constexpr = PLANE[0]
    WIDTH: tl.constexpr = PLANE[6]
    if PLANE[2]:
        of_channel, added_to = of_channels(scale, zero, at, group, PLANE, PAGE)
        factor, added = of_channel[None, :], added_to[None, :]
    else:
        d = tl.arange(0, PLANE[7])
        own = at * (PAGE * (WIDTH // PLANE[3]))
        place = token[:, None] * (WIDTH // PLANE[3]) + (d // PLANE[3])[None, :]
        there = (token < stored)[:, None] & (d < WIDTH)[None, :]
        factor, added = _meta(scale + own, zero + own, place, there, PLANE)
    value = number(digit, tl.float32, PLANE) if CODE == "fp8" else digit.to(tl.float32) - PLANE[4]
    return (value * factor + added).to(DTYPE)
