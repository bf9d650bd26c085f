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
from ..pages.triton import plane
from . import paged
from .dense import attend
from .naive import Flat
from .packed import attend_pages

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
    """:func:`.decode_attention` in two launches, and two more for pages that have a kernel of their own (:mod:`.paged`); on the
    CPU in Triton's interpreter, if that was chosen."""
    b, hq, q, d = query.shape
    hkv, tail, dv = *keys.shape[1:3], values.shape[3]
    if q > MAX_QUERIES:
        raise ValueError(
            f"query has {q} tokens and the decode kernel takes at most {MAX_QUERIES}; use prefill attention."
        )
    if pages is not None and paged.fits(pages, query, dv):
        rest = (query, keys, values, scaling, flat, None, visible)
        beside = decode_attention_kernel(*rest) if tail or flat is not None else None
        seen = None if visible is None else (*_mask_arguments(visible, keys)[:2], _columns(pages))
        programs = PROGRAMS_EACH * _multiprocessors(query.device)
        return paged.attend_pages(query, pages, scaling * LOG2E, seen, programs, beside, dv)
    if not readable(pages, query, dv):
        raise ValueError(
            "The decode kernel reads pages of one or two planes of keys and one of values, in tiles of 16 to 128."
        )
    heads, rows = b * hkv, hq // hkv * q
    query, keys, values = query.contiguous(), _rows(keys), _rows(values)
    ragged = Flat(keys, values, keys) if flat is None else Flat(_rows(flat.keys), _rows(flat.values), flat.cu_lengths)
    mask, strides, columns = _mask_arguments(visible, keys)
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
        _decode, (programs, triton.cdiv(rows, plan.block_m)),
        query, turned, *ragged[:3], keys, values, mask, part, part_lse, cu_pages, *packed,
        scaling * LOG2E, heads, hkv, rows, q, tail, tail_tiles, *keys.stride()[:3], *values.stride()[:3], *strides,
        columns - tail - (0 if flat is None else flat.width), columns - tail,
        MASKED=visible is not None, SINGLE=q == 1, BLOCK_M=plan.block_m,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **layout, **planes, **{name: value for name, value in plan.constants.items() if name not in layout},
        **plan.options,
    )  # fmt: skip
    enqueue(
        _merge, (heads, rows),
        part, part_lse, ragged.cu_lengths, cu_pages, out, lse, heads, rows, tail_tiles,
        PROGRAMS=programs, DV=dv, BLOCK_DV=plan.constants["BLOCK_DV"], PARTS=32, **layout, num_warps=4,
    )  # fmt: skip
    return out, lse


def readable(pages: Pages | None, query: Tensor, dv: int) -> bool:
    """Whether a kernel reads these pages: at most two planes of keys, one of values, tiles that a product can take."""
    if pages is None or paged.fits(pages, query, dv):
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


def _mask_arguments(visible: Tensor | None, keys: Tensor) -> tuple[Tensor, tuple[int, int, int], int]:
    """The mask as bytes, its strides by sequence, key head and query, and its columns; a stand-in where there is none."""
    if visible is None:
        return keys, (0, 0, 0), keys.shape[2]
    mask = _rows(visible)
    of_heads = mask.stride(1) if mask.shape[1] > 1 else 0
    return mask.view(torch.uint8), (mask.stride(0), of_heads, mask.stride(2)), mask.shape[3]


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
    lists.append(_columns(pages) if masked else pages.table)
    return [*tensors(first), *tensors(other), *tensors(value), *channels, *lists], constants


def _columns(pages: Pages) -> Tensor:
    """The first token of every listed page among those of its head."""
    counts = pages.count[pages.table]
    before = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    page = torch.arange(len(counts), device=counts.device, dtype=torch.int32)
    head = torch.searchsorted(pages.cu_pages, page, right=True)
    return before[:-1] - before[pages.cu_pages.long()][head - 1]


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
def _before(lengths, h, RAGGED: tl.constexpr, PACKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages and tiles before head ``h``: at most one more a head than are needed, and no sum over heads to find it.

    ``lengths`` are where heads begin in flat storage, and in the table of pages, and the tiles of everybody's tail.
    """
    cu_lengths, cu_pages, tail_tiles = lengths
    tiles = h * tail_tiles
    if PACKED:
        tiles += tl.load(cu_pages + h)
    if RAGGED:
        tiles += (tl.load(cu_lengths + h) // BLOCK_N).to(tl.int32) + h
    return tiles


@jit
def _owner(lengths, heads, tile, RAGGED: tl.constexpr, PACKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The head that owns a tile of all."""
    head, above = tl.full([], 0, tl.int32), heads
    while above - head > 1:
        middle = (head + above) // 2
        if _before(lengths, middle, RAGGED, PACKED, BLOCK_N) <= tile:
            head = middle
        else:
            above = middle
    return head


@jit
def _leave(state, part, part_lse, program, head, row, rows, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Store what a program has found for a head: attention over its part of the keys, and its log-sum-exp to base 2."""
    highest, total, acc = state
    dv = tl.arange(0, BLOCK_DV)
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    at = (program + head).to(tl.int64) * rows + row
    tl.store(part + at[:, None] * DV + dv[None, :], acc, mask=(row < rows)[:, None] & (dv < DV)[None, :])
    tl.store(part_lse + at, tl.where(some, highest + tl.log2(total), float("-inf")), mask=row < rows)


@jit(do_not_specialize=_CHANGING)
def _decode(
    query, turned, flat_keys, flat_values, cu_lengths, keys, values, mask, part, part_lse, cu_pages,
    key_codes, key_scale, key_zero, other_codes, other_scale, other_zero, value_codes, value_scale, value_zero,
    channels, other_channels, count, meta, table, columns, scale, heads, kv_heads, rows, queries, tail, tail_tiles,
    key_b, key_h, key_n, value_b, value_h, value_n, mask_b, mask_h, mask_q, flat_column, tail_column,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, KEY: tl.constexpr, OTHER: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """One share of all tiles: for every head in it, attention over its part of the share, and its log-sum-exp."""
    program = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    lengths = (cu_lengths, cu_pages, tail_tiles)
    all_tiles = _before(lengths, heads, RAGGED, PACKED, BLOCK_N)
    share = tl.cdiv(all_tiles, tl.num_programs(0))
    first = program * share
    last = tl.minimum(first + share, all_tiles)
    head = _owner(lengths, heads, first, RAGGED, PACKED, BLOCK_N)
    while first < last:
        begin = _before(lengths, head, RAGGED, PACKED, BLOCK_N)
        end = _before(lengths, head + 1, RAGGED, PACKED, BLOCK_N)
        tile, tiles = first - begin, tl.minimum(last, end) - begin
        b, h = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
        state = (
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        )
        visible = mask + b * mask_b + h * mask_h
        if PACKED:
            packed = tl.load(cu_pages + head)
            own_pages = tl.load(cu_pages + head + 1) - packed
            state = attend_pages(
                state, turned + (head.to(tl.int64) * rows + row)[:, None] * D, head, row < rows,
                (key_codes, key_scale, key_zero), (other_codes, other_scale, other_zero),
                (value_codes, value_scale, value_zero), (channels, other_channels),
                (count, meta, table, columns), packed, own_pages, visible, mask_q, row, queries, tile, tiles, scale,
                MASKED, SINGLE, PRECISION, D, PAGE, TILE, KEY, OTHER, VALUE,
            )  # fmt: skip
            tile, tiles = tl.maximum(tile - own_pages, 0), tiles - own_pages
            begin += own_pages
        # not before the pages, which need its registers
        at = query + (head.to(tl.int64) * rows + row)[:, None] * D + d[None, :]
        q = tl.load(at, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)
        flat_tiles = end - begin - tail_tiles
        if RAGGED:
            start = tl.load(cu_lengths + head).to(tl.int64)
            length = (tl.load(cu_lengths + head + 1) - start).to(tl.int32)
            state = attend(
                state, q, flat_keys + start * D, flat_values + start * DV, D, DV, visible + flat_column, mask_q, row,
                queries, tile, tl.minimum(tiles, flat_tiles), length, length, scale,
                MASKED, SINGLE, PRECISION, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        state = attend(
            state, q, keys + b * key_b + h * key_h, values + b * value_b + h * value_h, key_n, value_n,
            visible + tail_column, mask_q, row, queries,
            tl.maximum(tile - flat_tiles, 0), tiles - flat_tiles, tail, tail - queries + 1, scale,
            MASKED, SINGLE, PRECISION, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        _leave(state, part, part_lse, program, head, row, rows, DV, BLOCK_DV)
        first = begin + tiles
        head += 1


@jit(do_not_specialize=["heads", "rows", "tail_tiles"])
def _merge(
    part, part_lse, cu_lengths, cu_pages, out, lse, heads, rows, tail_tiles,
    PROGRAMS: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row of one head: what the programs that share its keys have found, weighed by their sums of exponentials."""
    head, row = tl.program_id(0), tl.program_id(1)
    dv = tl.arange(0, BLOCK_DV)
    lengths = (cu_lengths, cu_pages, tail_tiles)
    share = tl.cdiv(_before(lengths, heads, RAGGED, PACKED, BLOCK_N), PROGRAMS)
    begin = _before(lengths, head, RAGGED, PACKED, BLOCK_N)
    end = _before(lengths, head + 1, RAGGED, PACKED, BLOCK_N)
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
