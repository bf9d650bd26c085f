"""Attention of a few new queries over a cache as it is stored: packed pages, ragged heads and a dense tail, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pages import Pages
from .heads import reads_heads
from .naive import Flat, decode_attention_definition
from .operator import attend, traced
from .triton import MAX_QUERIES, decode_attention_kernel

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float | None = None,
    flat: Flat | None = None,
    pages: Pages | None = None,
    visible: Tensor | None = None,
    tail: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest queries over everything that is stored; by the kernel on a GPU, else by the definition.

    Inside ``torch.compile(fullgraph=True)`` it is the operator ``torch.ops.mmaccel.decode_attention``.

    Parameters
    ----------
    query : ``[B, Hq, q, D]`` float16, bfloat16 or float32; on a GPU ``q`` is at most 16.
    keys, values : ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``, the tail; ``Hq`` is a multiple of ``Hkv``. Its last ``q`` are
        those of the queries.
    scaling : of the logits; by default ``D ** -0.5``.
    flat : keys and values before these.
    pages : packed keys and values before those.
    visible : ``[B, 1 or Hkv, q, C]`` bool, which query may see which key; by default all keys up to its own. The last ``T``
        columns are the tail, the ``flat.width`` before them the flat keys of each head, and what each head has packed
        begins at column 0.
    tail : ``[1]`` int32 or int64 on the device of the query, how many keys of the tail there are; all by default. What lies
        behind them is room to spare and never looked at, and the keys of the queries are the last ``q`` before it. The number
        is read on the device only: from step to step nothing that the host passes changes.
    added : ``[B, Hq, q, W]`` float32, products of the queries with a part of the keys that is not in ``pages``: they are added
        to the products with what each head has packed, which begins at column 0.

    Returns
    -------
    ``[B, Hq, q, Dv]`` like the query, and the logarithm of the sum of exponentials of the logits, ``[B, Hq, q]`` float32.
    A query that sees nothing gets zeros, and minus infinity.

    Raises
    ------
    ValueError
        If shapes, types or devices do not fit.
    """
    check(query, keys, values, flat, pages, visible, tail)
    if added is not None:
        if pages is None or added.dtype != torch.float32 or added.shape[:3] != query.shape[:3]:
            raise ValueError(
                f"added must be float32 {[*query.shape[:3]]} by the longest of what heads have packed, beside pages, not "
                f"{added.dtype} {tuple(added.shape)}."
            )
        added = added.contiguous()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    chosen = traced if torch.compiler.is_compiling() else attend
    return chosen(query, keys, values, scaling, flat, pages, visible, tail, added)


def check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    flat: Flat | None,
    pages: Pages | None,
    visible: Tensor | None,
    tail: Tensor | None,
) -> None:
    """Refuse by name what :func:`decode_attention` cannot take."""
    if query.dim() != 4 or keys.dim() != 4 or values.dim() != 4:
        raise ValueError("query, keys and values must have the shape [batch, heads, tokens, channels].")
    b, hq, q, d = query.shape
    hkv, capacity = keys.shape[1:3]
    if query.dtype not in _DTYPES:
        raise ValueError(f"query must be float16, bfloat16 or float32, not {query.dtype}.")
    if keys.shape != (b, hkv, capacity, d) or values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong to a query {tuple(query.shape)}."
        )
    if hkv == 0 or hq % hkv:
        raise ValueError(f"query has {hq} heads, which is no multiple of the {hkv} heads of keys.")
    tensors = {"keys": keys, "values": values}
    if flat is not None:
        tensors |= {"flat.keys": flat.keys, "flat.values": flat.values}
        if flat.keys.shape != (flat.values.shape[0], d) or flat.values.shape[1:] != values.shape[3:]:
            raise ValueError(
                f"flat.keys {tuple(flat.keys.shape)} and flat.values {tuple(flat.values.shape)} must be [total, {d}] and "
                f"[total, {values.shape[3]}]."
            )
        if flat.cu_lengths.shape != (b * hkv + 1,) or flat.cu_lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"flat.cu_lengths must be [{b * hkv + 1}] int32 or int64, batch times heads of keys plus one."
            )
        if flat.cu_lengths.device != query.device:
            raise ValueError(f"flat.cu_lengths is on {flat.cu_lengths.device} and query on {query.device}.")
    if pages is not None:
        if pages.heads != hkv or pages.batch != b:
            raise ValueError(f"pages hold {pages.batch} rows of {pages.heads} heads, and keys {b} rows of {hkv}.")
        widths = [pages.width_of(side) for side in (pages.keys, pages.values)]
        widths[0] = pages.key_width or widths[0]
        if widths != [d, values.shape[3]]:
            raise ValueError(
                f"pages hold {widths[0]} and {widths[1]} channels, and keys and values {d} and {values.shape[3]}."
            )
        if pages.table.device != query.device:
            raise ValueError(f"pages are on {pages.table.device} and query on {query.device}.")
    for name, x in tensors.items():
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} and query {query.dtype} on {query.device}.")
    if visible is not None:
        shape = tuple(visible.shape)
        if visible.dtype != torch.bool or len(shape) != 4 or shape[0] != b or shape[1] not in (1, hkv) or shape[2] != q:
            raise ValueError(f"visible must be bool [{b}, 1 or {hkv}, {q}, keys], not {visible.dtype} {shape}.")
        columns = capacity + (flat.width if flat is not None else 0)
        if shape[3] < columns or (pages is None and shape[3] != columns):
            raise ValueError(f"visible has {shape[3]} columns where keys and flat.width make {columns}.")
    if tail is not None and (tail.shape != (1,) or tail.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"tail must be [1] int32 or int64, not {list(tail.shape)} {tail.dtype}.")
    if tail is not None and tail.device != query.device:
        raise ValueError(f"tail is on {tail.device} and query on {query.device}.")


def decode_attention_cost(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    flat: Flat | None = None,
    pages: Pages | None = None,
    visible: Tensor | None = None,
) -> tuple[int, int]:
    """Bytes that :func:`decode_attention` has to move at least, and its floating-point operations.

    Everything stored is read once, every page as often as a head lists it and as if it were full. Of a tail with room to spare
    count what is filled: give ``keys[:, :, :n]``.
    """
    rows, dv = query.shape[:3].numel(), values.shape[3]
    moved = [query, keys, values] + ([] if visible is None else [visible])
    tokens = keys.shape[:3].numel()
    size = rows * (dv * query.element_size() + 4)
    if flat is not None:
        moved += flat[:3]
        tokens += len(flat.keys)
    if pages is not None:
        moved += [pages.cu_pages]
        tokens += int(pages.lengths().sum())
        for of in (*pages.keys, *pages.values):
            size += len(pages.table) * sum(part[:1].nbytes for part in (of.codes, *of.of_rows()))
            size += 0 if of.channels is None else of.channels.nbytes
        # the table itself, count and meta of every page
        size += len(pages.table) * 3 * 4
    operations = 2 * tokens * (query.shape[1] // keys.shape[1]) * query.shape[2] * (query.shape[3] + dv)
    return size + sum(x.nbytes for x in moved), operations


__all__ = [
    "MAX_QUERIES",
    "Flat",
    "decode_attention",
    "decode_attention_cost",
    "decode_attention_definition",
    "decode_attention_kernel",
    "reads_heads",
]
