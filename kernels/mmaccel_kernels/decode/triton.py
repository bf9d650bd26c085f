"""Attention of a few new queries over a cache as it is stored: packed pages, ragged heads and a dense tail, in one pass.

The keys are split over a fixed number of programs, in equal shares however unequal the heads are (as in Stream-K, and in
Lean Attention, Sanovar et al. 2024, arXiv:2405.10480); each keeps a running softmax (Flash-Decoding, Dao et al. 2023), and
a second launch merges what belongs to the same head. The query heads of a group share one read of their keys. No figure
is fetched from the device, no sum depends on the order of arrival, and nothing is compiled again for another length.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import enqueue
from ..pages import Pages, Plane
from .naive import Flat
from .packed import _attend_pages

#: new queries of a sequence that the kernel takes at once
MAX_QUERIES = 16

#: programs of a multiprocessor
PROGRAMS_EACH = 2

LOG2E = math.log2(math.e)

#: arguments that change with the lengths: nothing is compiled for their values
_CHANGING = [
    "heads",
    "rows",
    "queries",
    "tail",
    "tail_tiles",
    "mask_b",
    "mask_h",
    "mask_q",
    "flat_column",
    "tail_column",
]


def decode_attention_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: Flat | None = None,
    pages: Pages | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`.decode_attention` in two launches; on the CPU in Triton's interpreter, if that was chosen."""
    b, hq, q, d = query.shape
    hkv, tail, dv = *keys.shape[1:3], values.shape[3]
    if q > MAX_QUERIES:
        raise ValueError(
            f"query has {q} tokens and the decode kernel takes at most {MAX_QUERIES}; use prefill attention."
        )
    if not readable(pages):
        raise ValueError(
            "The decode kernel reads pages of one or two planes of keys and one of values, in tiles of 16 to 128."
        )
    heads, rows = b * hkv, hq // hkv * q
    query, keys, values = query.contiguous(), _rows(keys), _rows(values)
    ragged = Flat(keys, values, keys) if flat is None else Flat(_rows(flat.keys), _rows(flat.values), flat.cu_lengths)
    mask, mask_strides, columns = keys, (0, 0, 0), tail
    if visible is not None:
        visible = _rows(visible)
        mask, columns = visible.view(torch.uint8), visible.shape[3]
        mask_strides = (visible.stride(0), visible.stride(1) if visible.shape[1] > 1 else 0, visible.stride(2))
    plan = launch(hq // hkv, q, d, dv, query.element_size(), pages is not None, _capability(query.device))
    programs = PROGRAMS_EACH * _multiprocessors(query.device)
    # a program works on one head after the other, so program + head numbers what each of them has done for each
    part = query.new_empty(programs + heads, rows, dv, dtype=torch.float32)
    part_lse = query.new_empty(programs + heads, rows, dtype=torch.float32)
    out, lse = query.new_empty(b, hq, q, dv), query.new_empty(b, hq, q, dtype=torch.float32)
    tail_tiles = triton.cdiv(tail, plan.constants["BLOCK_N"])
    packed, planes = _packed_arguments(pages, query, visible is not None)
    turned = query if pages is None else pages.turned(query).contiguous()
    cu_pages = keys if pages is None else pages.cu_pages
    layout = {"RAGGED": flat is not None, "PACKED": pages is not None, "BLOCK_N": plan.constants["BLOCK_N"]}
    enqueue(
        _decode,
        (programs, triton.cdiv(rows, plan.block_m)),
        query,
        turned,
        *ragged[:3],
        keys,
        values,
        mask,
        part,
        part_lse,
        cu_pages,
        *packed,
        scaling * LOG2E,
        heads,
        hkv,
        rows,
        q,
        tail,
        tail_tiles,
        *keys.stride()[:3],
        *values.stride()[:3],
        *mask_strides,
        columns - tail - (0 if flat is None else flat.width),
        columns - tail,
        MASKED=visible is not None,
        SINGLE=q == 1,
        BLOCK_M=plan.block_m,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **layout,
        **planes,
        **{name: value for name, value in plan.constants.items() if name not in layout},
        **plan.options,
    )
    enqueue(
        _merge,
        (heads, rows),
        part,
        part_lse,
        ragged.cu_lengths,
        cu_pages,
        out,
        lse,
        heads,
        rows,
        tail_tiles,
        PROGRAMS=programs,
        DV=dv,
        BLOCK_DV=plan.constants["BLOCK_DV"],
        PARTS=32,
        **layout,
        num_warps=4,
    )
    return out, lse


def readable(pages: Pages | None) -> bool:
    """Whether the kernel reads these pages: at most two planes of keys, one of values, tiles that a product can take."""
    if pages is None:
        return True
    whole = len(pages.values) == 1 and pages.values[0].channels is None
    return whole and len(pages.keys) <= 2 and pages.tile in (16, 32, 64, 128)


class Launch(NamedTuple):
    """How the first kernel is launched: depends on the model and the device, never on a length."""

    block_m: int
    constants: dict[str, int]
    options: dict[str, int]


def launch(groups: int, queries: int, d: int, dv: int, itemsize: int, packed: bool, capability: int) -> Launch:
    """The shipped configurations: tiles of at most 16 KiB of keys, as many rows as the registers hold without spilling.

    Parameters
    ----------
    capability : of an NVIDIA GPU, such as 90; 0 for others.
    """
    block_d, block_dv = (max(16, triton.next_power_of_2(n)) for n in (d, dv))
    most = 16 if itemsize == 4 else 64 if queries == 1 else 32
    block_m = min(most, max(16, triton.next_power_of_2(groups * queries)))
    # beside the deep pipeline that pages have on sm_90, more keys at once would not fit the registers
    block_n = min(32 if packed and capability >= 90 else 64, max(16, 16384 // (block_d * itemsize)))
    constants = {"D": d, "DV": dv, "BLOCK_N": block_n, "BLOCK_D": block_d, "BLOCK_DV": block_dv}
    # what is fetched ahead takes registers, of which sm_80 has too few for 2-bit pages
    few = capability == 0 or (packed and capability < 90)
    stages = 2 if few else 3 if block_d > 64 and not packed else 4
    small = capability == 0 or (block_m == 16 and not packed)
    return Launch(block_m, constants, {"num_warps": 4 if small else 8, "num_stages": stages})


def plane(of: Plane, dtype: torch.dtype) -> tuple[str, int, bool, int, float, bool, int, int, int]:
    """What the kernel must know of a plane: code, digits, whether channels share scales, group, centre, whether there are
    zero points, width, padded width, and what a code becomes more by when it becomes a number of ``dtype``."""
    form, width = of.format, of.codes.shape[2]
    offset = {torch.bfloat16: 128 if form.levels <= 128 else 0, torch.float16: 1024, torch.float32: 0}[dtype]
    if form.code == "fp8" or form.axis == "token":
        offset = 0
    block = max(16, triton.next_power_of_2(width))
    return form.code, form.digits, form.axis == "channel", form.group, form.centre, form.affine, width, block, offset


def _packed_arguments(pages: Pages | None, like: Tensor, masked: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors of pages, in the order of the kernel, and what it must know of them; stand-ins where there are none."""
    if pages is None:
        return [like] * 15, {"PAGE": 0, "TILE": 0, "KEY": None, "OTHER": None, "VALUE": None}

    def tensors(of: Plane) -> list[Tensor]:
        return [t.contiguous() for t in (of.codes, of.scale, of.scale if of.zero is None else of.zero)]

    first, other, value = pages.keys[0], pages.keys[-1], pages.values[0]
    channels = [of.channels.contiguous() if of.channels is not None else pages.table for of in (first, other)]
    constants = {
        "PAGE": pages.page,
        "TILE": pages.tile,
        "KEY": plane(first, like.dtype),
        "OTHER": plane(other, like.dtype) if len(pages.keys) == 2 else None,
        "VALUE": plane(value, like.dtype),
    }
    lists = [pages.count, pages.meta, pages.table]
    if masked:
        counts = pages.count[pages.table]
        before = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        # the first token of every listed page among those of its head
        head = torch.searchsorted(
            pages.cu_pages, torch.arange(len(counts), device=counts.device, dtype=torch.int32), right=True
        )
        lists.append(before[:-1] - before[pages.cu_pages.long()][head - 1])
    else:
        lists.append(pages.table)
    return [*tensors(first), *tensors(other), *tensors(value), *channels, *lists], constants


def _rows(x: Tensor) -> Tensor:
    """The same, its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _capability(device: torch.device) -> int:
    """Of an NVIDIA GPU, such as 90; 0 for others."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _multiprocessors(device: torch.device) -> int:
    """Of the GPU; two for the interpreter, so that work is split there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@jit
def _before(cu_lengths, cu_pages, h, tail_tiles, RAGGED: tl.constexpr, PACKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages and tiles before head ``h``: at most one more a head than are needed, and no sum over heads to find it."""
    tiles = h * tail_tiles
    if PACKED:
        tiles += tl.load(cu_pages + h)
    if RAGGED:
        tiles += (tl.load(cu_lengths + h) // BLOCK_N).to(tl.int32) + h
    return tiles


@jit
def _attend(
    q,
    highest,
    total,
    acc,
    keys,
    values,
    key_step,
    value_step,
    mask,
    mask_step,
    row,
    queries,
    tile,
    tiles,
    length,
    newest,
    scale,
    MASKED: tl.constexpr,
    SINGLE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The running softmax over tiles ``tile`` to ``tiles`` of ``length`` keys, of which query 0 sees ``newest``."""
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for start in range(tile * BLOCK_N, tl.minimum(tiles * BLOCK_N, length), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        stored = n < length
        k = tl.load(keys + n[:, None] * key_step + d[None, :], mask=stored[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(
            values + n[:, None] * value_step + dv[None, :], mask=stored[:, None] & (dv < DV)[None, :], other=0.0
        )
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SINGLE:
            if MASKED:
                stored = tl.load(mask + n, mask=stored, other=0) != 0
            seen = stored[None, :]
        elif MASKED:
            query = (row % queries)[:, None] * mask_step
            seen = tl.load(mask + query + n[None, :], mask=stored[None, :], other=0) != 0
        else:
            seen = stored[None, :] & (n[None, :] < newest + (row % queries)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        # a row that has seen nothing yet
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        highest = higher
    return highest, total, acc


@jit
def _channels_of(channels, head, rows, PLANE: tl.constexpr, PART: tl.constexpr):
    """The channels a plane of keys holds, ``[1, BLOCK]``, and where a query ``[BLOCK_M, BLOCK]`` has them."""
    d = tl.arange(0, PLANE[7])
    there = d < PLANE[6]
    channel = d
    if PART:
        channel = tl.load(channels + head.to(tl.int64) * PLANE[6] + d, mask=there, other=0)
    return channel[None, :], rows[:, None] & there[None, :]


@jit(do_not_specialize=_CHANGING)
def _decode(
    query,
    turned,
    flat_keys,
    flat_values,
    cu_lengths,
    keys,
    values,
    mask,
    part,
    part_lse,
    cu_pages,
    key_codes,
    key_scale,
    key_zero,
    other_codes,
    other_scale,
    other_zero,
    value_codes,
    value_scale,
    value_zero,
    channels,
    other_channels,
    count,
    meta,
    table,
    columns,
    scale,
    heads,
    kv_heads,
    rows,
    queries,
    tail,
    tail_tiles,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    mask_b,
    mask_h,
    mask_q,
    flat_column,
    tail_column,
    RAGGED: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KEY: tl.constexpr,
    OTHER: tl.constexpr,
    VALUE: tl.constexpr,
):
    """One share of all tiles: for every head in it, attention over its part of the share, and its log-sum-exp."""
    program = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    share = tl.cdiv(_before(cu_lengths, cu_pages, heads, tail_tiles, RAGGED, PACKED, BLOCK_N), tl.num_programs(0))
    first = program * share
    last = tl.minimum(first + share, _before(cu_lengths, cu_pages, heads, tail_tiles, RAGGED, PACKED, BLOCK_N))
    # the head that owns the first tile
    head, above = tl.full([], 0, tl.int32), heads
    while above - head > 1:
        middle = (head + above) // 2
        if _before(cu_lengths, cu_pages, middle, tail_tiles, RAGGED, PACKED, BLOCK_N) <= first:
            head = middle
        else:
            above = middle
    while first < last:
        begin = _before(cu_lengths, cu_pages, head, tail_tiles, RAGGED, PACKED, BLOCK_N)
        end = _before(cu_lengths, cu_pages, head + 1, tail_tiles, RAGGED, PACKED, BLOCK_N)
        tile, tiles = first - begin, tl.minimum(last, end) - begin
        b, h = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        visible = mask + b * mask_b + h * mask_h
        if PACKED:
            packed = tl.load(cu_pages + head)
            own_pages = tl.load(cu_pages + head + 1) - packed
            rows_at = turned + (head.to(tl.int64) * rows + row)[:, None] * D
            channel, there = _channels_of(channels, head, row < rows, KEY, KEY[6] != D)
            if OTHER is None:
                other, other_there = channel, there
            else:
                other, other_there = _channels_of(other_channels, head, row < rows, OTHER, True)
            highest, total, acc = _attend_pages(
                rows_at + channel,
                there,
                rows_at + other,
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
                table + packed,
                columns + packed,
                visible,
                mask_q,
                row,
                queries,
                tile,
                tl.minimum(tiles, own_pages),
                scale,
                MASKED,
                SINGLE,
                PRECISION,
                PAGE,
                TILE,
                KEY,
                OTHER,
                VALUE,
            )
            tile, tiles = tl.maximum(tile - own_pages, 0), tiles - own_pages
            begin += own_pages
        # not before the pages, which need its registers
        at = query + (head.to(tl.int64) * rows + row)[:, None] * D + d[None, :]
        q = tl.load(at, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)
        flat_tiles = end - begin - tail_tiles
        if RAGGED:
            start = tl.load(cu_lengths + head).to(tl.int64)
            length = (tl.load(cu_lengths + head + 1) - start).to(tl.int32)
            highest, total, acc = _attend(
                q,
                highest,
                total,
                acc,
                flat_keys + start * D,
                flat_values + start * DV,
                D,
                DV,
                visible + flat_column,
                mask_q,
                row,
                queries,
                tile,
                tl.minimum(tiles, flat_tiles),
                length,
                length,
                scale,
                MASKED,
                SINGLE,
                PRECISION,
                D,
                DV,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
            )
        highest, total, acc = _attend(
            q,
            highest,
            total,
            acc,
            keys + b * key_b + h * key_h,
            values + b * value_b + h * value_h,
            key_n,
            value_n,
            visible + tail_column,
            mask_q,
            row,
            queries,
            tl.maximum(tile - flat_tiles, 0),
            tiles - flat_tiles,
            tail,
            tail - queries + 1,
            scale,
            MASKED,
            SINGLE,
            PRECISION,
            D,
            DV,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
        )
        some = total > 0
        acc = acc / tl.where(some, total, 1.0)[:, None]
        slot = (program + head).to(tl.int64) * rows + row
        tl.store(part + slot[:, None] * DV + dv[None, :], acc, mask=(row < rows)[:, None] & (dv < DV)[None, :])
        tl.store(part_lse + slot, tl.where(some, highest + tl.log2(total), float("-inf")), mask=row < rows)
        first = begin + tiles
        head += 1


@jit(do_not_specialize=["heads", "rows", "tail_tiles"])
def _merge(
    part,
    part_lse,
    cu_lengths,
    cu_pages,
    out,
    lse,
    heads,
    rows,
    tail_tiles,
    PROGRAMS: tl.constexpr,
    RAGGED: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One row of one head: what the programs that share its keys have found, weighed by their sums of exponentials."""
    head, row = tl.program_id(0), tl.program_id(1)
    dv = tl.arange(0, BLOCK_DV)
    share = tl.cdiv(_before(cu_lengths, cu_pages, heads, tail_tiles, RAGGED, PACKED, BLOCK_N), PROGRAMS)
    begin = _before(cu_lengths, cu_pages, head, tail_tiles, RAGGED, PACKED, BLOCK_N)
    end = _before(cu_lengths, cu_pages, head + 1, tail_tiles, RAGGED, PACKED, BLOCK_N)
    # no program may have come by a head without a tile
    first = begin // share
    last = tl.where(end > begin, (end - 1) // share, first - 1)
    highest, total, acc = float("-inf"), 0.0, tl.zeros([BLOCK_DV], tl.float32)
    for start in range(first, last + 1, PARTS):
        program = start + tl.arange(0, PARTS)
        slot = (program + head).to(tl.int64) * rows + row
        found = tl.load(part_lse + slot, mask=program <= last, other=float("-inf"))
        there = (program <= last)[:, None] & (dv < DV)[None, :]
        x = tl.load(part + slot[:, None] * DV + dv[None, :], mask=there, other=0.0)
        higher = tl.maximum(highest, tl.max(found, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(found - base)
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * x, 0)
        highest = higher
    some = total > 0
    at = head.to(tl.int64) * rows + row
    acc = acc / tl.where(some, total, 1.0)
    tl.store(out + at * DV + dv, acc.to(out.dtype.element_ty), mask=dv < DV)
    tl.store(lse + at, tl.where(some, (highest + tl.log2(total)) / 1.4426950408889634, float("-inf")))
