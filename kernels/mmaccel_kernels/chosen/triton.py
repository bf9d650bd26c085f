"""Attention over chosen keys as Triton programs, as in Flash-Decoding (Dao et al. 2023): what a head reads is one list, of
which each program has a share, and a second launch merges. How long the list is only the device knows."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._softmax import gathered, leave, weighed
from .._triton import jit, tl, triton
from ..decode import triton as dense
from ..decode.merge import filled_of
from ..launch import Repeated, is_even, workspace
from .naive import ChosenKeys

#: query heads that a program takes at once; more would not fit the registers of every GPU beside the addresses of keys
ROWS = 16


def chosen_attention_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: ChosenKeys,
    scaling: float,
    visible: Tensor | None = None,
    tail: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`.chosen_attention` in two launches."""
    (b, hq, _, d), (hkv, total), dv = query.shape, keys.shape[1:3], values.shape[3]
    heads, rows = b * hkv, hq // hkv
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query.contiguous(), keys, values))
    always, units, picked, count = (x.contiguous() for x in chosen[:4])
    mask = None if visible is None else visible.contiguous().view(torch.uint8)
    tensors = [x for x in (query, keys, values, always, units, picked, count, mask) if x is not None]
    unit, fixed = units.shape[3], always.shape[2]
    capability, kernels = dense._capability(query.device), (_attend_chosen, _merge_chosen)
    room = None if tail is None else tail.dtype
    step = _step(kernels, query.device, query.dtype, d, dv, unit, mask is not None, room, capability)
    tiles = triton.cdiv(fixed + total - chosen.stored + picked.shape[2] * unit, step.block_n)
    splits = max(1, min(tiles, triton.cdiv(dense.PROGRAMS_EACH * dense._multiprocessors(query.device), heads)))
    # parts are numbered by head and split
    part, part_lse = workspace(query, heads * splits * rows * dv, heads * splits * rows)
    out, lse = query.new_empty(b, hq, 1, dv), query.new_empty(b, hq, 1, dtype=torch.float32)
    steps, known = (*keys.stride()[:3], *values.stride()[:3]), (always, units, picked, count)
    by_head = [stride for x in (*known, *([] if mask is None else [mask])) for stride in _steps(x)]
    even = is_even(steps, tensors)
    step.attend.launch(
        (splits, heads, triton.cdiv(rows, ROWS)), even,
        query, keys, values, *known, mask, tail, part, part_lse, scaling * math.log2(math.e), hkv, rows, fixed,
        chosen.stored, total, *steps, *by_head, *([0, 0] if mask is None else []),
    )  # fmt: skip
    step.merge.launch(
        (heads, rows, 1), even, part, part_lse, count, tail, out, lse, hkv, rows, fixed, chosen.stored, total, splits,
        *_steps(count),
    )  # fmt: skip
    return out, lse


def _steps(x: Tensor) -> tuple[int, int]:
    """From row to row, and from head to head."""
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0


class Step(NamedTuple):
    """Both launches, and the keys that a program takes at once."""

    attend: Repeated
    merge: Repeated
    block_n: int


@lru_cache(maxsize=256)
def _step(
    kernels: tuple[Any, Any],
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    dv: int,
    unit: int,
    masked: bool,
    room: torch.dtype | None,
    capability: int,
) -> Step:
    """What is compiled for a device and type, channels, keys of a unit, with or without a mask, and the type of the number that
    says on the device how many keys there are, if there is one."""
    plan = dense.launch(1, 1, d, dv, dtype.itemsize, False, capability)
    block_n = plan.constants["BLOCK_N"]
    roomy, precision = room is not None, "ieee" if dtype == torch.float32 else "tf32"
    kind = {"MASKED": masked, "ROOMY": roomy, "UNIT": unit, "PRECISION": precision}
    # products in full float32 take the registers of twice as many threads
    options = plan.options | {"num_warps": 8 if dtype == torch.float32 else 4}
    attend = {**plan.constants, **kind, "BLOCK_M": ROWS, **options}
    merge = {
        "ROOMY": roomy,
        "UNIT": unit,
        "BLOCK_N": block_n,
        "DV": dv,
        "BLOCK_DV": plan.constants["BLOCK_DV"],
        "PARTS": 32,
        "num_warps": 4,
    }
    return Step(Repeated(kernels[0], attend), Repeated(kernels[1], merge), block_n)


@jit
def _slots(n, end, always, units, picked, fixed, stored, later, UNIT: tl.constexpr):
    """The slots of entries ``n [N]`` of the list, -1 for none: what is always read, what came later, then the picked units."""
    there, place = n < end, n - fixed - later
    slot = tl.load(always + n, mask=there & (n < fixed), other=-1)
    slot = tl.where((n >= fixed) & (place < 0), n - fixed + stored, slot)
    chosen = there & (place >= 0)
    unit = tl.load(picked + place // UNIT, mask=chosen, other=0).to(tl.int64)
    return tl.where(
        chosen, tl.load(units + unit * UNIT + place % UNIT, mask=chosen, other=-1), tl.where(there, slot, -1)
    )


@jit
def _share(length, splits, BLOCK_N: tl.constexpr):
    """Entries of one program: whole tiles, at least one."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), splits), 1) * BLOCK_N


@jit(
    do_not_specialize=[
        "kv_heads", "rows", "fixed", "stored", "total", "always_b", "always_h", "unit_b", "unit_h", "picked_b",
        "picked_h", "count_b", "count_h", "mask_b", "mask_h",
    ],
    do_not_specialize_on_alignment=["filled"],
)  # fmt: skip
def _attend_chosen(
    query, keys, values, always, units, picked, count, mask, filled, part, part_lse, scale, kv_heads, rows, fixed,
    stored, total,
    key_b, key_h, key_n, value_b, value_h, value_n, always_b, always_h, unit_b, unit_h, picked_b, picked_h,
    count_b, count_h, mask_b, mask_h,
    MASKED: tl.constexpr, ROOMY: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A share of what one head reads: attention over it, and its log-sum-exp to base 2."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // kv_heads, head % kv_heads
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q = tl.load(
        query + (head * rows + row)[:, None] * D + d[None, :], mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0
    )
    keys += b * key_b + h * key_h
    values += b * value_b + h * value_h
    always += b * always_b + h * always_h
    units += b * unit_b + h * unit_h
    picked += b * picked_b + h * picked_h
    if MASKED:
        mask += b * mask_b + h * mask_h
    later = filled_of(filled, total, ROOMY) - stored
    length = fixed + later + tl.load(count + b * count_b + h * count_h) * UNIT
    share = _share(length, tl.num_programs(0), BLOCK_N)
    end = tl.minimum((split + 1) * share, length)
    highest, weight = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(split * share, end, BLOCK_N):
        slot = _slots(start + tl.arange(0, BLOCK_N), end, always, units, picked, fixed, stored, later, UNIT).to(
            tl.int64
        )
        seen = slot >= 0
        if MASKED:
            seen = seen & (tl.load(mask + slot, mask=seen, other=0) != 0)
        k = tl.load(keys + slot[:, None] * key_n + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(values + slot[:, None] * value_n + dv[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        logits = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, float("-inf"))
        p, shrink, highest, weight = weighed(logits, highest, weight)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    some = weight > 0
    at = (head * tl.num_programs(0) + split) * rows + row
    acc = acc / tl.where(some, weight, 1.0)[:, None]
    tl.store(part + at[:, None] * DV + dv[None, :], acc, mask=(row < rows)[:, None] & (dv < DV)[None, :])
    tl.store(part_lse + at, tl.where(some, highest + tl.log2(weight), float("-inf")), mask=row < rows)


@jit(
    do_not_specialize=["kv_heads", "rows", "fixed", "stored", "total", "splits", "count_b", "count_h"],
    do_not_specialize_on_alignment=["filled"],
)
def _merge_chosen(
    part, part_lse, count, filled, out, lse, kv_heads, rows, fixed, stored, total, splits, count_b, count_h,
    ROOMY: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One query head: what the programs that had a share of its list have found."""
    head, row = tl.program_id(0), tl.program_id(1)
    fixed += filled_of(filled, total, ROOMY) - stored
    length = fixed + tl.load(count + head // kv_heads * count_b + head % kv_heads * count_h) * UNIT
    # parts of a head follow each other
    first = head * (splits - 1)
    last = first + tl.cdiv(length, _share(length, splits, BLOCK_N)) - 1
    state = float("-inf"), 0.0, tl.zeros([BLOCK_DV], tl.float32)
    state = gathered(part, part_lse, head, row, rows, first, last, state, DV, BLOCK_DV, PARTS)
    leave(out, lse, head, row, rows, state, DV, BLOCK_DV)
