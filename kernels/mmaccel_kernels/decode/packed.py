"""The part of the decode kernel that reads packed pages (their layout is specified in :mod:`mmaccel_kernels.pages`).

Nothing is expanded where the tokens of several tiles share the scale of a channel: ``q . k = (q * scale) . c + q . zero`` and
``sum p v = scale * sum p c + zero sum p``. A code enters the product as the float with the exponent of 128 (bfloat16) or 1024
(float16) and the code as its last bits; what that adds is taken off with the zero point, in float32.
"""

from __future__ import annotations

from .._triton import jit, tl


@jit
def _digit(word, i: tl.constexpr, PLANE: tl.constexpr):
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
def _number(digit, DTYPE: tl.constexpr, PLANE: tl.constexpr):
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
def _words(codes, index, block, PLANE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, stored):
    """``[TILE, BLOCK]`` uint8, the bytes of ``block``; none of tokens that are not stored."""
    DIGITS: tl.constexpr = PLANE[1]
    WIDTH: tl.constexpr = PLANE[6]
    t, d = tl.arange(0, TILE), tl.arange(0, PLANE[7])
    rows: tl.constexpr = (PAGE + TILE * DIGITS - 1) // (TILE * DIGITS) * TILE
    at = codes + index * (rows * WIDTH) + (block * TILE + t)[:, None] * WIDTH + d[None, :]
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
def _of_channels(scale, zero, at, group, PLANE: tl.constexpr, PAGE: tl.constexpr):
    """``[BLOCK]`` each: scales and zero points of the channels in a group of tokens."""
    WIDTH: tl.constexpr = PLANE[6]
    d = tl.arange(0, PLANE[7])
    own = (at * (PAGE // PLANE[3]) + group) * WIDTH
    return _meta(scale + own, zero + own, d, d < WIDTH, PLANE)


@jit
def _expanded(
    digit, scale, zero, at, group, token, stored, DTYPE: tl.constexpr, PLANE: tl.constexpr, PAGE: tl.constexpr
):
    """``[TILE, BLOCK]``: what the codes of one tile stand for, where scales serve no more than it."""
    CODE: tl.constexpr = PLANE[0]
    WIDTH: tl.constexpr = PLANE[6]
    if PLANE[2]:
        of_channel, added_to = _of_channels(scale, zero, at, group, PLANE, PAGE)
        factor, added = of_channel[None, :], added_to[None, :]
    else:
        d = tl.arange(0, PLANE[7])
        own = at * (PAGE * (WIDTH // PLANE[3]))
        place = token[:, None] * (WIDTH // PLANE[3]) + (d // PLANE[3])[None, :]
        there = (token < stored)[:, None] & (d < WIDTH)[None, :]
        factor, added = _meta(scale + own, zero + own, place, there, PLANE)
    number = _number(digit, tl.float32, PLANE) if CODE == "fp8" else digit.to(tl.float32) - PLANE[4]
    return (number * factor + added).to(DTYPE)


@jit
def _scaled_query(q, factor, added, PLANE: tl.constexpr):
    """The query with the scales in it, what its products are to be multiplied by, and what is to be added then."""
    scaled = q.to(tl.float32) * factor[None, :]
    unit = tl.full([q.shape[0]], 1.0, tl.float32)
    if q.dtype == tl.float16:
        # scales must not carry it beyond the range of float16
        unit = tl.max(tl.abs(scaled), 1)
        unit = tl.where(unit > 0, unit, 1.0)
    operand = (scaled / unit[:, None]).to(q.dtype)
    excess = (PLANE[4] + PLANE[8]) * unit * tl.sum(operand.to(tl.float32), 1)
    return operand, unit, tl.sum(q.to(tl.float32) * added[None, :], 1) - excess


@jit
def _attend_pages(
    query,
    there,
    other_query,
    other_there,
    highest,
    total,
    acc,
    key_codes,
    key_scale,
    key_zero,
    other_codes,
    other_scale,
    other_zero,
    value_codes,
    value_scale,
    value_zero,
    count,
    meta,
    table,
    columns,
    mask,
    mask_step,
    row,
    queries,
    first,
    last,
    scale,
    MASKED: tl.constexpr,
    SINGLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KEY: tl.constexpr,
    OTHER: tl.constexpr,
    VALUE: tl.constexpr,
):
    """The running softmax over pages ``first`` to ``last`` of ``table``.

    ``KEY``, ``VALUE`` and ``OTHER``, a second plane of keys or None, are :func:`.decode.plane` of each.
    """
    DTYPE: tl.constexpr = query.dtype.element_ty
    t = tl.arange(0, TILE)
    for page in range(first, last):
        index = tl.load(table + page)
        stored = tl.load(count + index)
        at = tl.load(meta + index).to(tl.int64)
        index = index.to(tl.int64)
        for s in tl.static_range(PAGE // TILE):
            if s > 0:
                # one tile after the other: work on several at once would take more registers than there are
                tl.debug_barrier()
            token = s * TILE + t
            if s % KEY[1] == 0:
                key_words = _words(key_codes, index, s // KEY[1], KEY, PAGE, TILE, stored)
            digit = _digit(key_words, s % KEY[1], KEY)
            if KEY[2] and KEY[3] > TILE:
                if s * TILE % KEY[3] == 0:
                    factor, added = _of_channels(key_scale, key_zero, at, s * TILE // KEY[3], KEY, PAGE)
                    # read again where it is needed: it would fill a quarter of the registers
                    q = tl.load(query, mask=there, other=0.0, volatile=True)
                    operand, unit, lift = _scaled_query(q, factor, added, KEY)
                k = _number(digit, DTYPE, KEY)
                logits = tl.dot(operand, tl.trans(k), input_precision=PRECISION) * unit[:, None] + lift[:, None]
            else:
                group = s * TILE // KEY[3]
                k = _expanded(digit, key_scale, key_zero, at, group, token, stored, DTYPE, KEY, PAGE)
                q = tl.load(query, mask=there, other=0.0)
                logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if OTHER is not None:
                if s % OTHER[1] == 0:
                    other_words = _words(other_codes, index, s // OTHER[1], OTHER, PAGE, TILE, stored)
                digit = _digit(other_words, s % OTHER[1], OTHER)
                if OTHER[2] and OTHER[3] > TILE:
                    if s * TILE % OTHER[3] == 0:
                        factor, added = _of_channels(other_scale, other_zero, at, s * TILE // OTHER[3], OTHER, PAGE)
                        q = tl.load(other_query, mask=other_there, other=0.0, volatile=True)
                        other_operand, other_unit, other_lift = _scaled_query(q, factor, added, OTHER)
                    k = _number(digit, DTYPE, OTHER)
                    more = tl.dot(other_operand, tl.trans(k), input_precision=PRECISION)
                    logits += more * other_unit[:, None] + other_lift[:, None]
                else:
                    group = s * TILE // OTHER[3]
                    k = _expanded(digit, other_scale, other_zero, at, group, token, stored, DTYPE, OTHER, PAGE)
                    q = tl.load(other_query, mask=other_there, other=0.0)
                    logits += tl.dot(q, tl.trans(k), input_precision=PRECISION)
            seen = (token < stored)[None, :]
            if MASKED:
                column = tl.load(columns + page) + token
                if SINGLE:
                    seen = (tl.load(mask + column, mask=token < stored, other=0) != 0)[None, :]
                else:
                    line = (row % queries)[:, None] * mask_step
                    seen = tl.load(mask + line + column[None, :], mask=seen, other=0) != 0
            logits = tl.where(seen, logits * scale, float("-inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(logits - base[:, None])
            shrink = tl.exp2(highest - base)
            highest = higher
            total = total * shrink + tl.sum(p, 1)
            p = p.to(DTYPE)
            if s % VALUE[1] == 0:
                value_words = _words(value_codes, index, s // VALUE[1], VALUE, PAGE, TILE, stored)
            digit = _digit(value_words, s % VALUE[1], VALUE)
            if VALUE[2]:
                if s * TILE % VALUE[3] == 0:
                    # products with codes, in a sum of their own until the group ends
                    products, weights, since = tl.zeros_like(acc), tl.zeros_like(total), tl.zeros_like(total) + 1.0
                v = _number(digit, DTYPE, VALUE)
                products = products * shrink[:, None] + tl.dot(p, v, input_precision=PRECISION)
                weights = weights * shrink + tl.sum(p.to(tl.float32), 1)
                since *= shrink
                if (s + 1) * TILE % VALUE[3] == 0:
                    factor, added = _of_channels(value_scale, value_zero, at, s * TILE // VALUE[3], VALUE, PAGE)
                    added -= (VALUE[4] + VALUE[8]) * factor
                    acc = acc * since[:, None] + products * factor[None, :] + weights[:, None] * added[None, :]
            else:
                v = _expanded(digit, value_scale, value_zero, at, 0, token, stored, DTYPE, VALUE, PAGE)
                acc = acc * shrink[:, None] + tl.dot(p, v, input_precision=PRECISION)
    return highest, total, acc
