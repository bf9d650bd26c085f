"""New keys and values written behind those of a preallocated cache, at a slot that only the device knows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import run
from .naive import append_definition
from .triton import append_kernel


def append(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    at: Tensor,
    *,
    index: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """Write new keys and values, and where they came from, in place and in one launch; by the kernel on a GPU, else by the
    definition.

    Nothing is allocated and nothing that the host passes changes from step to step, so a CUDA graph may hold it; inside
    ``torch.compile(fullgraph=True)`` it is the operator ``torch.ops.mmaccel.append``, or on a CPU the definition.

    Parameters
    ----------
    keys, values : ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``, changed; their channels are contiguous.
    new_keys, new_values : ``[B, Hkv, q, D]`` and ``[B, Hkv, q, Dv]`` of the same type, in any memory layout.
    at : ``[1]`` int32 or int64 on the device of the keys, the slot of the first one. ``at + q`` is at most ``T``: what does not
        fit is left out on a GPU, where nobody can be told, and raises an IndexError elsewhere.
    index, places : ``[B, T]`` int32, changed, and ``[B, q]`` int32 or int64, written likewise.

    Raises
    ------
    ValueError
        If shapes, types or devices do not fit.
    """
    _check(keys, values, new_keys, new_values, at, index, places)
    if torch.compiler.is_compiling() and keys.device.type == "cpu":
        # nothing to keep whole: what is around it may be fused with it
        append_definition(keys, values, new_keys, new_values, at, index, places)
    elif torch.compiler.is_compiling():
        torch.ops.mmaccel.append(keys, values, new_keys, new_values, at, index, places)
    else:
        run(append_kernel, append_definition, keys, values, new_keys, new_values, at, index, places)


@torch.library.custom_op(
    "mmaccel::append",
    mutates_args=("keys", "values", "index"),
    schema="(Tensor(a!) keys, Tensor(b!) values, Tensor new_keys, Tensor new_values, Tensor at, Tensor(c!)? index, "
    "Tensor? places) -> ()",
)
def _append(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    at: Tensor,
    index: Tensor | None,
    places: Tensor | None,
) -> None:
    run(append_kernel, append_definition, keys, values, new_keys, new_values, at, index, places)


@_append.register_fake
def _(*_: Tensor | None) -> None:
    """Nothing comes back."""


def append_cost(new_keys: Tensor, new_values: Tensor, places: Tensor | None = None) -> tuple[int, int]:
    """Bytes that :func:`append` has to move at least, and its floating-point operations: what is new is read and written."""
    size = 2 * (new_keys.nbytes + new_values.nbytes)
    return size + (0 if places is None else places.nbytes + 4 * places.numel()), 0


def _check(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    at: Tensor,
    index: Tensor | None,
    places: Tensor | None,
) -> None:
    if any(x.dim() != 4 for x in (keys, values, new_keys, new_values)) or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"append takes keys [B, Hkv, T, D] and values [B, Hkv, T, Dv], not {tuple(keys.shape)} and {tuple(values.shape)}."
        )
    b, heads, capacity, d = keys.shape
    new = (b, heads, new_keys.shape[2])
    if new_keys.shape != (*new, d) or new_values.shape != (*new, values.shape[3]):
        raise ValueError(
            f"new_keys {tuple(new_keys.shape)} and new_values {tuple(new_values.shape)} do not belong to keys "
            f"{tuple(keys.shape)} and values {tuple(values.shape)}."
        )
    if new[2] > capacity:
        raise ValueError(f"new_keys has {new[2]} tokens, and keys has room for {capacity}.")
    if at.shape != (1,) or at.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"at must be [1] int32 or int64, not {list(at.shape)} {at.dtype}.")
    if (index is None) != (places is None):
        raise ValueError("index and places come together.")
    for name, x in {"values": values, "new_keys": new_keys, "new_values": new_values}.items():
        if x.dtype != keys.dtype or x.device != keys.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} and keys {keys.dtype} on {keys.device}.")
    if index is not None and places is not None:
        if index.shape != (b, capacity) or index.dtype != torch.int32:
            raise ValueError(f"index must be [{b}, {capacity}] int32, not {list(index.shape)} {index.dtype}.")
        if places.shape != (b, new[2]) or places.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"places must be [{b}, {new[2]}] int32 or int64, not {list(places.shape)} {places.dtype}.")
    for name, other in {"at": at, "index": index, "places": places}.items():
        if other is not None and other.device != keys.device:
            raise ValueError(f"{name} is on {other.device} and keys on {keys.device}.")
    if keys.stride(3) != 1 or values.stride(3) != 1 or (index is not None and index.stride(1) != 1):
        raise ValueError("The last dimension of keys, values and index must be contiguous.")


__all__ = ["append", "append_cost", "append_definition", "append_kernel"]
