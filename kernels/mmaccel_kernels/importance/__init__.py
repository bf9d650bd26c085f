"""Attention importance: how much attention every key receives, in two streamed passes over queries and keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..launch import run
from .naive import Importance, importance_definition, importance_pass
from .triton import importance_kernel, tiles

#: how the query heads of one key head are joined
Join = Literal["none", "mean", "sum", "max"]

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
    query : ``[B, Hq, q, D]`` float16, bfloat16 or float32, those of the last ``q`` keys unless ``visible`` is given.
    key : ``[B, Hkv, K, D]``, then ``K >= q``; ``Hq`` is a multiple of ``Hkv``. The kernel reads it in the type of the queries.
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


def importance_cost(
    batch: int, heads: int, kv: int, queries: int, keys: int, width: int, bytes_each: int
) -> tuple[int, int]:
    """Bytes that the two launches have to move at least, and the floating-point operations of their products, plain causal
    attention whose queries all count the same."""
    pairs = queries * (keys - queries) + queries * (queries + 1) // 2
    read = 2 * bytes_each * batch * width * (heads * queries + kv * keys)
    return read + 4 * batch * heads * (2 * queries + keys), 4 * batch * heads * width * pairs


def _check(
    query: Tensor, key: Tensor, weight: Tensor | None, valid: Tensor | None, visible: Tensor | None, join: str
) -> None:
    fits = query.dim() == key.dim() == 4 and len(query) == len(key) and query.shape[3] == key.shape[3]
    behind = visible is None and query.shape[2] > key.shape[2]
    if not fits or query.shape[1] % max(1, key.shape[1]) or behind:
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


__all__ = [
    "Importance",
    "Join",
    "importance",
    "importance_cost",
    "importance_definition",
    "importance_kernel",
    "importance_pass",
    "tiles",
]
