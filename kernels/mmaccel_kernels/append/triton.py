"""Appending as a Triton program: a program writes a few tokens of one head, keys and values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import Repeated, is_even

#: tokens of one program
BLOCK = 16


def append_kernel(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    at: Tensor,
    index: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """:func:`.append` in one launch."""
    b, heads, new, d = new_keys.shape
    if not new_keys.numel() + new_values.numel():
        return
    new_keys, new_values = (x if x.stride(3) == 1 else x.contiguous() for x in (new_keys, new_values))
    steps = (*keys.stride()[:3], *values.stride()[:3], *new_keys.stride()[:3], *new_values.stride()[:3])
    types = (keys.dtype, at.dtype, None if places is None else places.dtype)
    _repeated(_append, keys.device, types, d, values.shape[3]).launch(
        (-(-new // BLOCK), b * heads, 1), is_even(steps, [keys, values, new_keys, new_values]),
        keys, values, new_keys, new_values, at, index, places, new, keys.shape[2], heads, *steps,
        0 if index is None else index.stride(0), *((0, 0) if places is None else places.stride()),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _repeated(kernel: Any, device: torch.device, types: tuple[torch.dtype | None, ...], d: int, dv: int) -> Repeated:
    """What is compiled for a device, types of keys, slot and places (None for none), and channels."""
    widths = {"BLOCK_D": triton.next_power_of_2(d), "BLOCK_DV": triton.next_power_of_2(dv)}
    options = {"PLACES": types[2] is not None, "D": d, "DV": dv, "BLOCK": BLOCK, **widths, "num_warps": 4}
    return Repeated(kernel, options)


@jit
def _written(x, new, slot, stored, token, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows ``token [N]`` of ``new`` to rows ``slot [N]`` of ``x``, those ``stored``; both are an address and a step."""
    to, to_step = x
    source, step = new
    d = tl.arange(0, BLOCK)[None, :]
    inside = stored[:, None] & (d < D)
    found = tl.load(source + token[:, None] * step + d, mask=inside)
    tl.store(to + slot[:, None] * to_step + d, found, mask=inside)


@jit(
    do_not_specialize=["new", "capacity", "heads", "index_b", "place_b", "place_n"],
    do_not_specialize_on_alignment=["at", "index", "places"],
)
def _append(
    keys, values, new_keys, new_values, at, index, places, new, capacity, heads,
    key_b, key_h, key_n, value_b, value_h, value_n, new_key_b, new_key_h, new_key_n, new_value_b, new_value_h, new_value_n,
    index_b, place_b, place_n,
    PLACES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(at).to(tl.int64) + token
    stored = (token < new) & (slot < capacity)
    _written(
        (keys + b * key_b + h * key_h, key_n), (new_keys + b * new_key_b + h * new_key_h, new_key_n),
        slot, stored, token, D, BLOCK_D,
    )  # fmt: skip
    _written(
        (values + b * value_b + h * value_h, value_n), (new_values + b * new_value_b + h * new_value_h, new_value_n),
        slot, stored, token, DV, BLOCK_DV,
    )  # fmt: skip
    if PLACES:
        # all heads store the same
        if head % heads == 0:
            place = tl.load(places + b * place_b + token * place_n, mask=stored, other=0)
            tl.store(index + b * index_b + slot, place.to(tl.int32), mask=stored)
