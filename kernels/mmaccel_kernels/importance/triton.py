"""Attention importance as two Triton programs, each a streamed pass over queries and keys.

The first finds the logarithm of every query's sum of exponentials, the second sums the probabilities of every key. Where there
are few queries the first splits the keys, and a third puts its parts together in between. No part of the attention matrix is
stored, and no sum depends on the order of arrival.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._softmax import weighed
from .._triton import jit, tl, triton
from ..launch import enqueue

#: programs that keep a GPU busy; the first pass over few queries splits the keys to get there
PROGRAMS = 512

#: parts and queries that are put together at once
PARTS, ROWS = 32, 64


def importance_kernel(
    query: Tensor, key: Tensor, scaling: float, weight: Tensor | None, valid: Tensor | None, visible: Tensor | None
) -> Tensor:
    """:func:`.importance` per query head in two launches, or three for few queries."""
    (batch, heads, queries, width), (keys, kv) = query.shape, (key.shape[2], key.shape[1])
    # heads and tokens may lie anywhere; only their channels lie together
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key.to(query.dtype)))
    steps = *query.stride()[:3], *key.stride()[:3]
    rows, tile = heads // kv * queries, tiles(queries, width, query.element_size())
    block_k = tile["BLOCK_K"]
    splits = min(triton.cdiv(keys, block_k), max(1, PROGRAMS // (batch * kv * triton.cdiv(rows, tile["BLOCK_Q"]))))
    share = triton.cdiv(triton.cdiv(keys, block_k), splits) * block_k
    there = key if valid is None else valid.contiguous().view(torch.uint8)
    seen = key if visible is None else visible.contiguous().view(torch.uint8)
    seen_heads = 1 if visible is None else visible.shape[1]
    given = {"VALID": valid is not None, "VISIBLE": visible is not None}
    sizes = (queries, keys, kv, heads // kv, seen_heads, width, scaling * math.log2(math.e))
    partial = torch.empty(splits, batch * kv, rows, device=query.device)
    blocks = triton.cdiv(rows, tile["BLOCK_Q"])
    grid: tuple[int, ...] = (blocks, batch * kv, splits)
    enqueue(
        _row_sums, grid, query, key, there, seen, partial, *sizes, share, *steps, **given, **tile, WHOLE_ROW=splits == 1
    )
    total = partial[0]
    if splits > 1:
        enqueue(
            _put_together, (triton.cdiv(total.numel(), ROWS),), partial, total.numel(), splits, PARTS=PARTS, ROWS=ROWS
        )
    sums = torch.empty(batch, heads, keys, device=query.device)
    grid = (triton.cdiv(keys, block_k), batch * kv)
    counts = total if weight is None else weight.contiguous()
    mine = key, there, seen, total, counts, 0 if weight is None else queries, sums
    enqueue(_column_sums, grid, query, *mine, *sizes, *steps, **given, **tile)
    return sums


def tiles(queries: int, width: int, bytes_each: int) -> dict[str, int]:
    """The tile sizes that are shipped: queries and keys at a time, by head size and the size of a number.

    ``WHOLE`` tiles hold all channels; full float32 products leave no registers for that.
    """
    whole = bytes_each < 4
    side = (64 if width <= 128 else 32) if whole else 16
    return {
        "WHOLE": whole,
        "BLOCK_Q": min(side, max(16, 1 << (queries - 1).bit_length())),
        "BLOCK_K": 32,
        "BLOCK_D": max(16, 1 << (width - 1).bit_length()) if whole else 32,
        "num_warps": 4,
    }


@jit
def _vectors(at, there, width, WHOLE: tl.constexpr, BLOCK_D: tl.constexpr):
    """All channels of the vectors behind the pointers ``at``, if tiles are ``WHOLE``; else the pointers."""
    if WHOLE:
        d = tl.arange(0, BLOCK_D)
        return tl.load(at[:, None] + d, mask=there[:, None] & (d < width), other=0.0)
    else:
        return at


@jit
def _products(q, k, of, there, width, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Products ``[BLOCK_Q, BLOCK_K]`` of rows behind the pointers ``q`` and ``k``, a few channels at a time: full float32
    products leave no registers for more."""
    products = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mine = tl.load(q[:, None] + d, mask=of[:, None] & (d < width), other=0.0)
        theirs = tl.load(k[:, None] + d, mask=there[:, None] & (d < width), other=0.0)
        products = tl.dot(mine, tl.trans(theirs), products, input_precision="ieee")
    return products


@jit
def _logits(
    q, k, of, valid, visible, i, j, queries, keys, width, scale,
    VALID: tl.constexpr, VISIBLE: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits ``[BLOCK_Q, BLOCK_K]`` of what :func:`_vectors` has of queries ``i`` and keys ``j``, at most -1e30 where a query
    may not look; queries beyond the last are taken for it."""
    if WHOLE:
        logits = tl.dot(q, tl.trans(k)) * scale
    else:
        logits = _products(q, k, of, j < keys, width, BLOCK_Q, BLOCK_K, BLOCK_D) * scale
    # added, not chosen: one predicate a product would not fit AMD's scalar registers
    shut = tl.where(j < keys, 0.0, float("-inf"))
    if VALID:
        shut += (tl.load(valid + j, mask=j < keys, other=1).to(tl.float32) - 1.0) * 1e30
    logits += shut[None, :]
    if VISIBLE:
        look = visible + tl.minimum(i, queries - 1).to(tl.int64) * keys
        return logits + (tl.load(look[:, None] + tl.minimum(j, keys - 1)[None, :]).to(tl.float32) - 1.0) * 1e30
    else:
        return tl.where(j[None, :] <= (i + keys - queries)[:, None], logits, float("-inf"))


@jit
def _masks(valid, visible, queries, keys, kv, seen_heads):
    """Where the masks of this program's sequence and key head begin."""
    batch, head = (tl.program_id(1) // kv).to(tl.int64), tl.program_id(1) % kv
    return valid + batch * keys, visible + (batch * seen_heads + head % seen_heads) * queries * keys


@jit(do_not_specialize=["queries", "keys", "share"])
def _row_sums(
    query, key, valid, visible, partial,
    queries, keys, kv, groups, seen_heads, width, scale, share,
    query_row, query_head, query_token, key_row, key_head, key_token,
    VALID: tl.constexpr, VISIBLE: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """Of every query head and query, the logarithm of the sum of exponentials over a share of the keys."""
    row = tl.program_id(1).to(tl.int64)
    query += row // kv * query_row
    key += row // kv * key_row + row % kv * key_head
    valid, visible = _masks(valid, visible, queries, keys, kv, seen_heads)
    split, rows = tl.program_id(2), groups * queries
    r = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    of, i = r < rows, r % queries
    at = (row % kv * groups + r // queries) * query_head + i.to(tl.int64) * query_token
    q = _vectors(query + at, of, width, WHOLE, BLOCK_D)
    first = split * share
    last = tl.minimum(first + share, keys)
    if not VISIBLE:
        last = tl.minimum(last, tl.max(tl.where(of, i, 0), 0) + keys - queries + 1)
    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    theirs = key + first.to(tl.int64) * key_token + tl.arange(0, BLOCK_K) * key_token
    for left in range(first, last, BLOCK_K):
        j = left + tl.arange(0, BLOCK_K)
        k = _vectors(theirs, j < keys, width, WHOLE, BLOCK_D)
        theirs += BLOCK_K * key_token
        logits = _logits(
            q, k, of, valid, visible, i, j, queries, keys, width, scale,
            VALID, VISIBLE, WHOLE, BLOCK_Q, BLOCK_K, BLOCK_D,
        )  # fmt: skip
        _, _, most, total = weighed(logits, most, total)
    out = (split * tl.num_programs(1) + row) * rows + r
    found = most + tl.log2(total)
    if WHOLE_ROW:
        found = _settled(found)
    tl.store(partial + out, found, mask=of)


@jit
def _settled(total):
    """A query that sees no key pays nothing: every difference to infinity is minus infinity."""
    return tl.where(total < -1e29, float("inf"), total)


@jit(do_not_specialize=["count", "splits"])
def _put_together(partial, count, splits, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Of parts ``[splits, count]``, logarithms of sums to base 2, that of the whole sum, in place of the first part."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = at < count
    most, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        where = partial + at[:, None] + part[None, :].to(tl.int64) * count
        found = tl.load(where, mask=there[:, None] & (part < splits)[None, :], other=float("-inf"))
        _, _, most, total = weighed(found, most, total)
    tl.store(partial + at, _settled(most + tl.log2(total)), mask=there)


@jit(do_not_specialize=["given", "queries", "keys"])
def _column_sums(
    query, key, valid, visible, total, weight, given, sums,
    queries, keys, kv, groups, seen_heads, width, scale,
    query_row, query_head, query_token, key_row, key_head, key_token,
    VALID: tl.constexpr, VISIBLE: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of every query head and key, the sum over queries of weight times probability; the first ``given`` have a weight, which
    is 1 of the others."""
    row = tl.program_id(1).to(tl.int64)
    query += row // kv * query_row
    key += row // kv * key_row + row % kv * key_head
    valid, visible = _masks(valid, visible, queries, keys, kv, seen_heads)
    weight += (tl.program_id(1) // kv).to(tl.int64) * queries
    j = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    key += tl.program_id(0).to(tl.int64) * BLOCK_K * key_token
    k = _vectors(key + tl.arange(0, BLOCK_K) * key_token, j < keys, width, WHOLE, BLOCK_D)
    first = 0
    if not VISIBLE:
        # queries before the first key of the block see none of it
        first = tl.maximum(0, tl.program_id(0) * BLOCK_K - (keys - queries)) // BLOCK_Q * BLOCK_Q
    for group in range(0, groups):
        head = row * groups + group
        paid = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        # all but the steps within a tile in 64 bits
        mine = query + (row % kv * groups + group) * query_head + (row * 0 + first) * query_token
        mine += tl.arange(0, BLOCK_Q) * query_token
        for top in range(first, queries, BLOCK_Q):
            i = top + tl.arange(0, BLOCK_Q)
            of = i < queries
            q = _vectors(mine, of, width, WHOLE, BLOCK_D)
            mine += BLOCK_Q * query_token
            logits = _logits(
                q, k, of, valid, visible, i, j, queries, keys, width, scale,
                VALID, VISIBLE, WHOLE, BLOCK_Q, BLOCK_K, BLOCK_D,
            )  # fmt: skip
            sum_of = tl.load(total + head * queries + i, mask=of, other=float("inf"))
            counts = tl.load(weight + i, mask=of & (i < given), other=1.0)
            paid += tl.exp2(logits - sum_of[:, None]) * counts[:, None]
        tl.store(sums + head * keys + j, tl.sum(paid, 0), mask=j < keys)
