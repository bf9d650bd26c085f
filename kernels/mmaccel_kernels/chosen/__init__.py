"""Attention of one new query over chosen keys of a cache: they are read where they are stored, and nothing is gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import run
from .naive import ChosenKeys, chosen_attention_definition
from .triton import chosen_attention_kernel

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def chosen_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: ChosenKeys,
    *,
    scaling: float | None = None,
    visible: Tensor | None = None,
    tail: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest query over the keys that are ``chosen``, in two launches; by the kernel on a GPU, else by the
    definition.

    Parameters
    ----------
    query : ``[B, Hq, 1, D]`` float16, bfloat16 or float32.
    keys, values : ``[B, Hkv, K, D]`` and ``[B, Hkv, K, Dv]``, all that are stored; ``Hq`` is a multiple of ``Hkv``.
    scaling : of the logits; by default ``D ** -0.5``.
    visible : ``[B, 1 or Hkv, 1, K]`` bool, what may be seen of the chosen ones; all by default.
    tail : ``[1]`` int32 or int64 on the device of the query, how many keys there are, ``chosen.stored`` at least; all by
        default. What lies behind them is room to spare and never looked at. The number is read on the device only: from step
        to step nothing that the host passes changes.

    Returns
    -------
    ``[B, Hq, 1, Dv]`` like the query, and the logarithm of the sum of exponentials of the logits, ``[B, Hq, 1]`` float32.
    A query that sees nothing gets zeros, and minus infinity.

    Raises
    ------
    ValueError
        If shapes, types or devices do not fit.
    """
    _check(query, keys, values, chosen, visible, tail)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernel, definition = chosen_attention_kernel, chosen_attention_definition
    return run(kernel, definition, query, keys, values, chosen, scaling, visible, tail)


def chosen_attention_cost(query: Tensor, keys: Tensor, values: Tensor, chosen: ChosenKeys) -> tuple[int, int]:
    """Bytes that :func:`chosen_attention` has to move at least, and its floating-point operations: what is chosen is read once,
    and the slots where it is."""
    heads, rows = keys.shape[:2].numel(), query.shape[:2].numel()
    read = int((chosen.slots(keys.shape[2]) >= 0).expand(*keys.shape[:2], -1).sum())
    each = keys.shape[3] + values.shape[3]
    known = (chosen.always.shape[2] + int(chosen.counts.max()) * (1 + chosen.units.shape[3])) * heads * 4
    moved = (
        read * each * keys.element_size() + known + query.nbytes + rows * (values.shape[3] * query.element_size() + 4)
    )
    return moved, 2 * read * (query.shape[1] // keys.shape[1]) * each


def _check(
    query: Tensor, keys: Tensor, values: Tensor, chosen: ChosenKeys, visible: Tensor | None, tail: Tensor | None
) -> None:
    if query.dim() != 4 or keys.dim() != 4 or values.dim() != 4 or query.shape[2] != 1:
        raise ValueError(
            "query must have the shape [batch, heads, 1, channels], keys and values [batch, heads, keys, channels]."
        )
    (b, hq, _, d), (hkv, total) = query.shape, keys.shape[1:3]
    if query.dtype not in _DTYPES or keys.dtype != query.dtype or values.dtype != query.dtype:
        raise ValueError(
            f"query, keys and values must be of one type, float16, bfloat16 or float32, not {query.dtype}, {keys.dtype} "
            f"and {values.dtype}."
        )
    if keys.shape != (b, hkv, total, d) or values.shape[:3] != keys.shape[:3] or hkv == 0 or hq % hkv:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong to a query {tuple(query.shape)}."
        )
    for name, axes in {"always": 3, "units": 4, "picked": 3, "counts": 2}.items():
        x: Tensor = getattr(chosen, name)
        if x.dim() != axes or x.dtype != torch.int32 or len(x) != b or x.shape[1] not in (1, hkv):
            raise ValueError(
                f"chosen.{name} must be int32 [{b}, 1 or {hkv}, ...] with {axes} axes, not {tuple(x.shape)} {x.dtype}."
            )
    if not 0 <= chosen.stored <= total:
        raise ValueError(f"chosen.stored is {chosen.stored}, of {total} keys.")
    if visible is not None and (
        visible.dtype != torch.bool or visible.shape not in ((b, 1, 1, total), (b, hkv, 1, total))
    ):
        raise ValueError(
            f"visible must be bool [{b}, 1 or {hkv}, 1, {total}], not {visible.dtype} {tuple(visible.shape)}."
        )
    if tail is not None and (tail.shape != (1,) or tail.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"tail must be [1] int32 or int64, not {list(tail.shape)} {tail.dtype}.")
    if tail is not None and tail.device != query.device:
        raise ValueError(f"tail is on {tail.device} and query on {query.device}.")


__all__ = [
    "ChosenKeys",
    "chosen_attention",
    "chosen_attention_cost",
    "chosen_attention_definition",
    "chosen_attention_kernel",
]
