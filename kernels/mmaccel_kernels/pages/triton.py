"""Pages as Triton programs read them, a tile at a time: what :func:`.naive.unpack` and :func:`.naive.dequantise` define.

``PLANE`` is what :func:`plane` says of a plane of keys or values. A code enters a product as the float with the exponent of 128
(bfloat16) or 1024 (float16) and the code as its last bits; what that adds is for the reader to take off, in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .._triton import jit, tl, triton
from .format import Format
from .storage import Plane

#: columns of a product, and numbers of a channel or token, that a kernel adds to codes
MAX_RANK, MAX_SINGLE = 16, 32


def remainder_of(of: Plane) -> tuple[int, int]:
    """Columns of the product that is added to codes, and how many single numbers a channel has, or a token where scales are by
    token; 0 for none."""
    rest = of.rest
    if rest is None:
        return 0, 0
    lines = of.codes.shape[2] if of.format.axis == "channel" else of.scale.shape[1]
    return 0 if rest.left is None else rest.left.shape[2], 0 if rest.value is None else rest.value.shape[1] // lines


def plane(of: Plane, dtype: torch.dtype, first: int = 0, block: int = 0) -> tuple[Any, ...]:
    """Compile-time constants of a plane: code, digits, whether channels share scales, group, centre, whether there are zero
    points, width, padded width, what a code becomes more by when it becomes a number of ``dtype``, whether channels are
    interleaved; the positive levels of a book and how many these are; how many tiles have their codes in the same bytes; the
    column of its ``first`` channel in a ``block`` of columns; :func:`remainder_of` it."""
    return _constants(of.format, of.codes.shape[2], dtype, first, block, *remainder_of(of))


@lru_cache(maxsize=256)
def _constants(
    form: Format, width: int, dtype: torch.dtype, first: int, block: int, rank: int, single: int
) -> tuple[Any, ...]:
    """:func:`plane` of codes of ``width`` channels: a step asks the same of every layer."""
    offset = {torch.bfloat16: 128 if form.levels <= 128 else 0, torch.float16: 1024, torch.float32: 0}[dtype]
    if form.code == "fp8" or form.axis == "token":
        offset = 0
    block = block or max(16, triton.next_power_of_2(width))
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
        form.book,
        len(form.book),
        4 if form.three_bits else form.digits,
        first,
        rank,
        single,
    )


@jit
def _channels(PLANE: tl.constexpr):
    """The channels of a plane in columns of a tile, and which of them there are."""
    d = tl.arange(0, PLANE[7])
    there = d < PLANE[6]
    if PLANE[13]:
        d -= PLANE[13]
        there = (d >= 0) & (d < PLANE[6])
    return d, there


@jit
def digit(word, s: tl.constexpr, PLANE: tl.constexpr):
    """Codes of tile ``s``, int32, from what :func:`words` read of them."""
    DIGITS: tl.constexpr = PLANE[1]
    i: tl.constexpr = s % DIGITS
    if PLANE[0] == "int3" or PLANE[0] == "book3":
        low, high = word
        found = ((low.to(tl.int32) >> (s % 4 * 2)) & 3) | (((high.to(tl.int32) >> i) & 1) << 2)
    elif DIGITS == 5:
        found = ((word.to(tl.int32) * (3**i) & 255) * 3) >> 8
    elif DIGITS == 1:
        found = word.to(tl.int32)
    else:
        found = (word.to(tl.int32) >> (i * (8 // DIGITS))) & ((1 << (8 // DIGITS)) - 1)
    return found


@jit
def level(digit, PLANE: tl.constexpr):
    """Levels of a book, float32."""
    HALF: tl.constexpr = PLANE[11]
    rank = digit & (HALF - 1)
    value = tl.full(digit.shape, PLANE[10][0], tl.float32)
    for k in tl.static_range(1, HALF):
        value = tl.where(rank >= k, PLANE[10][k], value)
    return tl.where(digit >= HALF, -value, value)


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
def words(codes, index, s: tl.constexpr, PLANE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, stored):
    """``[TILE, BLOCK]`` uint8, the bytes with the codes of tile ``s``; none of tokens that are not stored. Of three bits both
    the bytes of the lower two and those of the highest."""
    if PLANE[0] == "int3" or PLANE[0] == "book3":
        TWO: tl.constexpr = (PAGE + TILE * 4 - 1) // (TILE * 4) * TILE
        ALL: tl.constexpr = TWO + (PAGE + TILE * 8 - 1) // (TILE * 8) * TILE
        codes += index * (ALL * PLANE[6])
        low = _words(codes, 0, s // 4, 4, PLANE, PAGE, TILE, stored)
        high = _words(codes + TWO * PLANE[6], 0, s // 8, 8, PLANE, PAGE, TILE, stored)
        word = low, high
    else:
        word = _words(codes, index, s // PLANE[1], PLANE[1], PLANE, PAGE, TILE, stored)
    return word


@jit
def _words(
    codes, index, block: tl.constexpr, DIGITS: tl.constexpr, PLANE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, stored
):  # fmt: skip
    """The bytes of ``block``, of so many digits each."""
    WIDTH: tl.constexpr = PLANE[6]
    t = tl.arange(0, TILE)
    d, in_plane = _channels(PLANE)
    rows: tl.constexpr = (PAGE + TILE * DIGITS - 1) // (TILE * DIGITS) * TILE
    place = d
    if PLANE[9]:
        place = d // (PLANE[3] // 8) % 8 * (WIDTH // 8) + d // PLANE[3] * (PLANE[3] // 8) + d % (PLANE[3] // 8)
    at = codes + index * (rows * WIDTH) + (block * TILE + t)[:, None] * WIDTH + place[None, :]
    # a byte's first digit is its earliest token
    there = ((block * DIGITS * TILE + t) < stored)[:, None] & in_plane[None, :]
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
def _remainder(rest, at, token, stored, PLANE: tl.constexpr, PAGE: tl.constexpr):
    """``[TILE, BLOCK]`` float32: what is added to the codes of one tile."""
    RANK: tl.constexpr = PLANE[14]
    SINGLE: tl.constexpr = PLANE[15]
    WIDTH: tl.constexpr = PLANE[6]
    left, right, value, place = rest
    d, there = _channels(PLANE)
    found = tl.full([token.shape[0], PLANE[7]], 0.0, tl.float32)
    for k in tl.static_range(RANK):
        of_token = tl.load(left + (at * PAGE + token) * RANK + k, mask=token < stored, other=0.0)
        of_channel = tl.load(right + (at * RANK + k) * WIDTH + d, mask=there, other=0.0)
        found += of_token.to(tl.float32)[:, None] * of_channel.to(tl.float32)[None, :]
    for k in tl.static_range(SINGLE):
        if PLANE[2]:
            line = (at * WIDTH + d) * SINGLE + k
            number = tl.load(value + line, mask=there, other=0.0).to(tl.float32)
            of = tl.load(place + line, mask=there, other=0).to(tl.int32) // WIDTH
            found += tl.where(token[:, None] == of[None, :], number[None, :], 0.0)
        else:
            line = (at * PAGE + token) * SINGLE + k
            number = tl.load(value + line, mask=token < stored, other=0.0).to(tl.float32)
            of = tl.load(place + line, mask=token < stored, other=0).to(tl.int32) % WIDTH
            found += tl.where(of[:, None] == d[None, :], number[:, None], 0.0)
    return found


@jit
def expanded(digit, plane, at, group, token, stored, DTYPE: tl.constexpr, PLANE: tl.constexpr, PAGE: tl.constexpr):
    """``[TILE, BLOCK]``: what the codes of one tile and their remainder represent, where scales serve no more than it."""
    _, scale, zero, rest = plane
    CODE: tl.constexpr = PLANE[0]
    WIDTH: tl.constexpr = PLANE[6]
    if PLANE[2]:
        of_channel, added_to = of_channels(scale, zero, at, group, PLANE, PAGE)
        factor, added = of_channel[None, :], added_to[None, :]
    else:
        d, in_plane = _channels(PLANE)
        own = at * (PAGE * (WIDTH // PLANE[3]))
        place = token[:, None] * (WIDTH // PLANE[3]) + (d // PLANE[3])[None, :]
        there = (token < stored)[:, None] & in_plane[None, :]
        factor, added = _meta(scale + own, zero + own, place, there, PLANE)
    if CODE == "fp8":
        value = number(digit, tl.float32, PLANE)
    elif PLANE[11] > 0:
        value = level(digit, PLANE)
    else:
        value = digit.to(tl.float32) - PLANE[4]
    value = value * factor + added
    if PLANE[14] + PLANE[15] > 0:
        value += _remainder(rest, at, token, stored, PLANE, PAGE)
    return value.to(DTYPE)
