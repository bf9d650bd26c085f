"""The part of the decode kernel that reads packed pages.

Nothing is expanded where the tokens of several tiles share the scale of a channel: ``q . k = (q * scale) . c + q . zero`` and
``sum p v = scale * sum p c + zero sum p``. What a code in a product is more than itself (:mod:`..pages.triton`) is taken off
with the zero point, in float32.
"""

from __future__ import annotations

from .._softmax import weighed
from .._triton import jit, tl
from ..pages.triton import digit, expanded, number, of_channels, words
from .dense import visible


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
def _products(
    s: tl.constexpr, held, query, there, plane, page,
    PLANE: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Products ``[BLOCK_M, TILE]`` of the queries with tile ``s`` of a plane of keys, and what the next tiles need of what was
    ``held`` for this one: bytes, and the queries with the scales of a group in them."""
    DTYPE: tl.constexpr = query.dtype.element_ty
    codes, scale, zero, _ = plane
    index, at, stored = page
    word, operand, unit, lift = held
    if s % PLANE[12] == 0:
        word = words(codes, index, s, PLANE, PAGE, TILE, stored)
    code = digit(word, s, PLANE)
    if PLANE[2] and PLANE[3] > TILE and PLANE[14] + PLANE[15] == 0:
        if s * TILE % PLANE[3] == 0:
            factor, added = of_channels(scale, zero, at, s * TILE // PLANE[3], PLANE, PAGE)
            # read again where it is needed: it would fill a quarter of the registers
            q = tl.load(query, mask=there, other=0.0, volatile=True)
            operand, unit, lift = _scaled_query(q, factor, added, PLANE)
        k = number(code, DTYPE, PLANE)
        products = tl.dot(operand, tl.trans(k), input_precision=PRECISION) * unit[:, None] + lift[:, None]
    else:
        token = s * TILE + tl.arange(0, TILE)
        k = expanded(code, plane, at, s * TILE // PLANE[3], token, stored, DTYPE, PLANE, PAGE)
        q = tl.load(query, mask=there, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return products, (word, operand, unit, lift)


@jit
def _with_values(
    s: tl.constexpr, held, acc, p, shrink, plane, more, page,
    PLANE: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``acc [BLOCK_M, BLOCK]`` with the values of tile ``s``, weighed by ``p [BLOCK_M, TILE]``, and what is ``held`` for the
    next tiles: bytes, and of a group that has not ended the products with codes, a sum of their own, its weights, and what
    ``acc`` has to shrink by; last the bytes of the plane ``more`` of the other channels, if there is one."""
    codes, scale, zero, _ = plane
    index, at, stored = page
    word, products, weights, since, more_word = held
    if s % PLANE[12] == 0:
        word = words(codes, index, s, PLANE, PAGE, TILE, stored)
    code = digit(word, s, PLANE)
    if PLANE[2] and PLANE[14] + PLANE[15] == 0:
        if s * TILE % PLANE[3] == 0:
            products, weights, since = tl.zeros_like(acc), tl.zeros_like(shrink), tl.zeros_like(shrink) + 1.0
        v = number(code, p.dtype, PLANE)
        products = products * shrink[:, None] + tl.dot(p, v, input_precision=PRECISION)
        weights = weights * shrink + tl.sum(p.to(tl.float32), 1)
        since *= shrink
        if (s + 1) * TILE % PLANE[3] == 0:
            factor, added = of_channels(scale, zero, at, s * TILE // PLANE[3], PLANE, PAGE)
            added -= (PLANE[4] + PLANE[8]) * factor
            acc = acc * since[:, None] + products * factor[None, :] + weights[:, None] * added[None, :]
    else:
        token = s * TILE + tl.arange(0, TILE)
        v = expanded(code, plane, at, s * TILE // PLANE[3], token, stored, p.dtype, PLANE, PAGE)
        if MORE is not None:
            if s % MORE[12] == 0:
                more_word = words(more[0], index, s, MORE, PAGE, TILE, stored)
            # each is zero in the columns of the other
            v += expanded(digit(more_word, s, MORE), more, at, 0, token, stored, p.dtype, MORE, PAGE)
        acc = acc * shrink[:, None] + tl.dot(p, v, input_precision=PRECISION)
    return acc, (word, products, weights, since, more_word)


@jit
def _channels_of(channels, head, rows, PLANE: tl.constexpr, PART: tl.constexpr):
    """The channels a plane of keys holds, ``[1, BLOCK]``, and where a query ``[BLOCK_M, BLOCK]`` has them."""
    d = tl.arange(0, PLANE[7])
    there = d < PLANE[6]
    channel = d
    if PART:
        channel = tl.load(channels + head.to(tl.int64) * PLANE[6] + d, mask=there, other=0)
    return channel[None, :], rows[:, None] & there[None, :]


@jit
def attend_pages(
    state, query, head, rows, key, other, value, more, channels, pages, begin, own, mask, mask_step, row, queries,
    tile, tiles, scale,
    MASKED: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, KEY: tl.constexpr, OTHER: tl.constexpr, VALUE: tl.constexpr,
    MORE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The running softmax over pages ``tile`` to ``tiles`` of a head, whose ``own`` pages begin at ``begin`` in the table.

    ``state`` is largest logit, sum of weights and sum of weighed values so far, ``key``, ``other`` (a second plane of keys),
    ``value`` and ``more`` (a second plane of values) are codes, scales, zero points and remainders, ``channels`` what the two
    planes of keys hold, and ``pages`` count, meta, table, the first column of each, and if ``ADDED`` where every row has what
    is added to its products by column. ``KEY``, ``OTHER`` (or None), ``VALUE`` and ``MORE`` (or None) are
    :func:`..pages.triton.plane`.
    """
    highest, total, acc = state
    count, meta, table, columns, added = pages
    channel, there = _channels_of(channels[0], head, rows, KEY, KEY[6] != D)
    if OTHER is None:
        other_channel, other_there = channel, there
    else:
        other_channel, other_there = _channels_of(channels[1], head, rows, OTHER, True)
    of_key, of_other = query + channel, query + other_channel
    table += begin
    columns += begin
    last = tl.minimum(tiles, own)
    t = tl.arange(0, TILE)
    for page in range(tile, last):
        index = tl.load(table + page)
        stored = tl.load(count + index)
        at = tl.load(meta + index).to(tl.int64)
        place = (index.to(tl.int64), at, stored)
        held, other_held, value_held = (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)
        for s in tl.static_range(PAGE // TILE):
            if s > 0:
                # one tile after the other: work on several at once would take more registers than there are
                tl.debug_barrier()
            token = s * TILE + t
            logits, held = _products(s, held, of_key, there, key, place, KEY, PRECISION, PAGE, TILE)
            if OTHER is not None:
                products, other_held = _products(
                    s, other_held, of_other, other_there, other, place, OTHER, PRECISION, PAGE, TILE
                )
                logits += products
            column = token
            if MASKED or ADDED:
                column = tl.load(columns + page) + token
            if ADDED:
                known = rows[:, None] & (token < stored)[None, :]
                logits += tl.load(added[:, None] + column[None, :], mask=known, other=0.0)
            seen = visible(mask, mask_step, column, token < stored, row, queries, MASKED, SINGLE)
            logits = tl.where(seen, logits * scale, float("-inf"))
            p, shrink, highest, total = weighed(logits, highest, total)
            p = p.to(query.dtype.element_ty)
            acc, value_held = _with_values(
                s, value_held, acc, p, shrink, value, more, place, VALUE, MORE, PRECISION, PAGE, TILE
            )
    return highest, total, acc
