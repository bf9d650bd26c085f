"""Attention importance: how much attention every key receives, in two streamed passes over queries and keys.

The first pass finds the logarithm of every query's sum of exponentials, the second sums the probabilities of every key. No
part of the attention matrix is stored, and no sum depends on the order of arrival.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ._triton import jit, tl, triton
from .launch import enqueue, run

#: how the query heads of one key head are joined
Join = Literal["none", "mean", "sum", "max"]

#: logits the definition holds at once
BLOCK = 1 << 22
#: programs that keep a GPU busy; the first pass over few queries splits the keys to get there
PROGRAMS = 512

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def importance(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float | None = None,
    weight: Tensor | None = None,
    valid: Tensor | None = None,
    visible: Tensor | None = None,
    join: Join = "none",
) -> Tensor:
    """Column sums of the attention of the newest queries: ``s_k = sum_q w_q softmax(scaling q . k)_k``.

    Parameters
    ----------
    query : ``[B, Hq, q, D]`` float16, bfloat16 or float32, those of the last ``q`` keys: a window, or all.
    key : ``[B, Hkv, K, D]``, ``K >= q``; ``Hq`` is a multiple of ``Hkv``. The kernel reads it in the type of the queries.
    scaling : of the logits; by default ``D ** -0.5``.
    weight : ``[B, q]`` float32, how much each query counts (0 for padding); by default 1.
    valid : ``[B, K]`` bool, the keys that are no padding; by default all.
    visible : ``[B, 1 or Hkv, q, K]`` bool, which query may see which key; by default a query sees all keys up to its own.
    join : how the query heads of one key head are joined, after summing; ``none`` keeps them apart.

    Returns
    -------
    ``[B, Hq, K]`` (``join="none"``) or ``[B, Hkv, K]`` float32. A query that sees no key adds nothing.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    _check(query, key, weight, valid, visible, join)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    given = (query, key, scaling, weight, valid, visible)
    sums = run(importance_kernel, importance_definition, *given) if query.numel() else importance_definition(*given)
    grouped = sums.unflatten(1, (key.shape[1], -1))
    if join == "none":
        return sums
    return grouped.amax(2) if join == "max" else grouped.mean(2) if join == "mean" else grouped.sum(2)


def importance_definition(
    query: Tensor, key: Tensor, scaling: float, weight: Tensor | None, valid: Tensor | None, visible: Tensor | None
) -> Tensor:
    """:func:`importance` per query head in plain torch, in blocks of queries, each with the keys it may see."""
    batch, heads, queries, _ = query.shape
    keys, old = key.shape[2], key.shape[2] - queries
    grouped, against = query.unflatten(1, (key.shape[1], -1)).float(), key.float().transpose(2, 3)[:, :, None]
    sums = torch.zeros(*grouped.shape[:3], keys, device=query.device)
    place = torch.arange(keys, device=query.device)
    height = max(1, BLOCK // max(1, batch * heads * keys))
    for top in range(0, queries, height):
        rows = slice(top, min(top + height, queries))
        upto = keys if visible is not None else old + rows.stop
        logits = grouped[:, :, :, rows] @ against[..., :upto] * scaling
        if visible is not None:
            seen = visible[:, :, None, rows]
        else:
            seen = place[:upto] <= place[old + top : old + rows.stop, None]
        if valid is not None:
            seen = seen & valid[:, None, None, None, :upto]
        # a query that sees nothing has no softmax
        paid = logits.masked_fill_(~seen, -torch.inf).softmax(-1).nan_to_num_(0.0)
        if weight is not None:
            paid = paid * weight[:, None, None, rows, None]
        sums[..., :upto] += paid.sum(3)
    return sums.flatten(1, 2)


def importance_kernel(
    query: Tensor, key: Tensor, scaling: float, weight: Tensor | None, valid: Tensor | None, visible: Tensor | None
) -> Tensor:
    """:func:`importance` per query head in two launches."""
    (batch, heads, queries, width), (keys, kv) = query.shape, (key.shape[2], key.shape[1])
    query, key = query.contiguous(), key.to(query.dtype).contiguous()
    rows, tile = heads // kv * queries, tiles(queries, width, query.element_size())
    block_k = tile["BLOCK_K"]
    splits = min(triton.cdiv(keys, block_k), max(1, PROGRAMS // (batch * kv * triton.cdiv(rows, tile["BLOCK_Q"]))))
    share = triton.cdiv(triton.cdiv(keys, block_k), splits) * block_k
    weight = query.new_ones(batch, queries, dtype=torch.float32) if weight is None else weight.contiguous()
    there = key if valid is None else valid.contiguous().view(torch.uint8)
    seen = key if visible is None else visible.contiguous().view(torch.uint8)
    seen_heads = 1 if visible is None else visible.shape[1]
    given = {"VALID": valid is not None, "VISIBLE": visible is not None}
    sizes = (queries, keys, kv, heads // kv, seen_heads, width, scaling * math.log2(math.e))
    partial = torch.empty(splits, batch * kv, rows, device=query.device)
    blocks = triton.cdiv(rows, tile["BLOCK_Q"])
    grid: tuple[int, ...] = (blocks, batch * kv, splits)
    enqueue(_row_sums, grid, query, key, there, seen, partial, *sizes, share, **given, **tile)
    total = torch.logsumexp(partial * math.log(2.0), 0) / math.log(2.0)
    # a query that sees no key pays nothing: every difference to it is minus infinity
    total = total.masked_fill_(total < -1e29, torch.inf)
    sums = torch.empty(batch, heads, keys, device=query.device)
    grid = (triton.cdiv(keys, block_k), batch * kv)
    enqueue(_column_sums, grid, query, key, there, seen, total, weight, sums, *sizes, **given, **tile)
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


def importance_cost(
    batch: int, heads: int, kv: int, queries: int, keys: int, width: int, bytes_each: int
) -> tuple[int, int]:
    """Bytes that the two launches have to move at least, and the floating-point operations of their products, plain causal
    attention."""
    pairs = queries * (keys - queries) + queries * (queries + 1) // 2
    read = 2 * bytes_each * batch * width * (heads * queries + kv * keys)
    return read + 4 * batch * (2 * heads * queries + queries + heads * keys), 4 * batch * heads * width * pairs


def _check(
    query: Tensor, key: Tensor, weight: Tensor | None, valid: Tensor | None, visible: Tensor | None, join: str
) -> None:
    fits = query.dim() == key.dim() == 4 and len(query) == len(key) and query.shape[3] == key.shape[3]
    if not fits or query.shape[1] % max(1, key.shape[1]) or query.shape[2] > key.shape[2]:
        raise ValueError(
            "importance takes query [B, Hq, q, D] and key [B, Hkv, K, D] with Hq a multiple of Hkv and q <= K, not "
            f"{tuple(query.shape)} and {tuple(key.shape)}."
        )
    if query.shape[3] > 256:
        raise ValueError(f"importance takes heads of at most 256 channels, not {query.shape[3]}.")
    if query.dtype not in _DTYPES or key.dtype not in _DTYPES:
        raise ValueError(f"importance takes float16, bfloat16 or float32, not {query.dtype} and {key.dtype}.")
    batch, kv, keys, queries = len(key), key.shape[1], key.shape[2], query.shape[2]
    if weight is not None and (weight.shape != (batch, queries) or weight.dtype != torch.float32):
        raise ValueError(
            f"importance takes weight [B, q] = {(batch, queries)} float32, not {tuple(weight.shape)} {weight.dtype}."
        )
    if valid is not None and (valid.shape != (batch, keys) or valid.dtype != torch.bool):
        raise ValueError(
            f"importance takes valid [B, K] = {(batch, keys)} bool, not {tuple(valid.shape)} {valid.dtype}."
        )
    if visible is not None:
        shapes = [(batch, h, queries, keys) for h in (1, kv)]
        if tuple(visible.shape) not in shapes or visible.dtype != torch.bool:
            raise ValueError(
                f"importance takes visible [B, 1 or Hkv, q, K], {shapes[0]} or {shapes[1]} bool, not {tuple(visible.shape)} "
                f"{visible.dtype}."
            )
    if join not in ("none", "mean", "sum", "max"):
        raise ValueError(f"importance joins heads by 'none', 'mean', 'sum' or 'max', not {join!r}.")


@jit
def _products(q, k, of, there, width, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _unseen(products, valid, visible, i, j, queries, keys, VALID: tl.constexpr, VISIBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The products, at most -1e30 where query ``i`` may not look at key ``j``; queries beyond the last are taken for it."""
    # added, not chosen: one predicate a product would not fit AMD's scalar registers
    shut = tl.where(j < keys, 0.0, float("-inf"))
    if VALID:
        shut += (tl.load(valid + j, mask=j < keys, other=1).to(tl.float32) - 1.0) * 1e30
    products += shut[None, :]
    if VISIBLE:
        look = visible + tl.minimum(i, queries - 1).to(tl.int64) * keys
        return products + (tl.load(look[:, None] + tl.minimum(j, keys - 1)[None, :]).to(tl.float32) - 1.0) * 1e30
    return tl.where(j[None, :] <= (i + keys - queries)[:, None], products, float("-inf"))


@jit(do_not_specialize=["queries", "keys", "share"])
def _row_sums(
    query,
    key,
    valid,
    visible,
    partial,
    queries,
    keys,
    kv,
    groups,
    seen_heads,
    width,
    scale,
    share,
    VALID: tl.constexpr,
    VISIBLE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row, batch = tl.program_id(1).to(tl.int64), (tl.program_id(1) // kv).to(tl.int64)
    split, rows = tl.program_id(2), groups * queries
    valid += batch * keys
    visible += (batch * seen_heads + tl.program_id(1) % kv % seen_heads) * queries * keys
    r, d = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    of, i = r < rows, r % queries
    mine = query + (row * rows + r) * width
    if WHOLE:
        q = tl.load(mine[:, None] + d, mask=of[:, None] & (d < width), other=0.0)
    first = split * share
    last = tl.minimum(first + share, keys)
    if not VISIBLE:
        last = tl.minimum(last, tl.max(tl.where(of, i, 0), 0) + keys - queries + 1)
    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for left in range(first, last, BLOCK_K):
        j = left + tl.arange(0, BLOCK_K)
        theirs = key + (row * keys + j) * width
        if WHOLE:
            k = tl.load(theirs[:, None] + d, mask=(j < keys)[:, None] & (d < width), other=0.0)
            logits = tl.dot(q, tl.trans(k)) * scale
        else:
            logits = _products(mine, theirs, of, j < keys, width, BLOCK_Q, BLOCK_K, BLOCK_D) * scale
        logits = _unseen(logits, valid, visible, i, j, queries, keys, VALID, VISIBLE)
        above = tl.maximum(most, tl.max(logits, 1))
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        most = above
    out = (split * tl.num_programs(1) + row) * rows + r
    tl.store(partial + out, most + tl.log2(total), mask=of)


@jit(do_not_specialize=["queries", "keys"])
def _column_sums(
    query,
    key,
    valid,
    visible,
    total,
    weight,
    sums,
    queries,
    keys,
    kv,
    groups,
    seen_heads,
    width,
    scale,
    VALID: tl.constexpr,
    VISIBLE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row, batch = tl.program_id(1).to(tl.int64), (tl.program_id(1) // kv).to(tl.int64)
    valid += batch * keys
    visible += (batch * seen_heads + tl.program_id(1) % kv % seen_heads) * queries * keys
    weight += batch * queries
    j, d = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    theirs = key + (row * keys + j) * width
    if WHOLE:
        k = tl.load(theirs[:, None] + d, mask=(j < keys)[:, None] & (d < width), other=0.0)
    first = 0
    if not VISIBLE:
        # queries before the first key of the block see none of it
        first = tl.maximum(0, tl.program_id(0) * BLOCK_K - (keys - queries)) // BLOCK_Q * BLOCK_Q
    for group in range(0, groups):
        head = row * groups + group
        paid = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        for top in range(first, queries, BLOCK_Q):
            i = top + tl.arange(0, BLOCK_Q)
            of = i < queries
            mine = query + (head * queries + i) * width
            if WHOLE:
                q = tl.load(mine[:, None] + d, mask=of[:, None] & (d < width), other=0.0)
                logits = tl.dot(q, tl.trans(k)) * scale
            else:
                logits = _products(mine, theirs, of, j < keys, width, BLOCK_Q, BLOCK_K, BLOCK_D) * scale
            logits = _unseen(logits, valid, visible, i, j, queries, keys, VALID, VISIBLE)
            sum_of = tl.load(total + head * queries + i, mask=of, other=float("inf"))
            counts = tl.load(weight + i, mask=of, other=0.0)
            paid += tl.exp2(logits - sum_of[:, None]) * counts[:, None]
        tl.store(sums + head * keys + j, tl.sum(paid, 0), mask=j < keys)
