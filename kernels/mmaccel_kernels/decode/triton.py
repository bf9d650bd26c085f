"""Attention of a few new queries over a cache as it is stored: packed pages, ragged heads and a dense tail, in one pass.

The keys are split over a fixed number of programs, in equal shares however unequal the heads are (as in Stream-K, and in
Lean Attention, Sanovar et al. 2024, arXiv:2405.10480), to a few keys and to whole pages; each keeps a running softmax
(Flash-Decoding, Dao et al. 2023), and a second launch merges what belongs to the same head. The query heads of a group share
one read of their keys. No figure is fetched from the device, no sum depends on the order of arrival, and nothing is compiled
again for another length.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import Repeated, is_even, workspace
from ..pages import Pages, Plane
from ..pages.storage import rotated_apart
from ..pages.triton import MAX_RANK, MAX_SINGLE, plane, remainder_of
from . import paged
from .dense import attend
from .merge import Left, LeftOfPages, Share, Turn, before, filled_of, merged, place_of, share_of, turn_of
from .naive import Flat
from .packed import attend_pages
from .paged import LOG2E

#: new queries of a sequence that the kernel takes at once
MAX_QUERIES = 16

#: programs of a multiprocessor
PROGRAMS_EACH = 2

#: keys that shares are counted in: few enough that every multiprocessor has work where a head stores a thousand
UNIT = 16

_NO_PLANES = tuple(
    {"PAGE": 0, "TILE": 0, "KEY": None, "OTHER": None, "VALUE": None, "MORE": None, "ADDED": False}.items()
)

#: arguments that change with the lengths: nothing is compiled for their values
_CHANGING = [
    "heads",
    "rows",
    "queries",
    "capacity",
    "mask_b",
    "mask_h",
    "mask_q",
    "flat_column",
    "tail_column",
    "added_step",
]


def decode_attention_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: Flat | None = None,
    pages: Pages | None = None,
    visible: Tensor | None = None,
    tail: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`.decode_attention` in two launches, and one more for pages that are read apart from other keys: those that have a
    loop of their own (:mod:`.paged`), and those whose keys or values are rotated or have factors. The launch for other keys
    comes first, and turns the query; values are turned back when all is merged. On the CPU in Triton's interpreter, if that was
    chosen."""
    hkv, capacity, dv = *keys.shape[1:3], values.shape[3]
    if query.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"query has {query.shape[2]} tokens and the decode kernel takes at most {MAX_QUERIES}; use prefill attention."
        )
    turn = turn_of(pages.values) if pages is not None and pages.values_turned else None
    stored = pages if pages is None or turn is None else pages.with_values_as_stored()
    # the loop in CUDA C++ takes a positive scale
    by_hand = stored is not None and scaling > 0 and added is None and not stored.remains
    found = paged.loop(stored, query, visible is not None) if stored is not None and by_hand else None
    looped = stored is not None and (found is not None or paged.fits(stored, query, dv))
    if not looped and not readable(pages, query, dv):
        raise ValueError(
            "The decode kernel reads pages in one or two planes of keys, one of values or two that are rotated apart, and "
            "tiles of 16 to 128."
        )
    query = query.contiguous()
    keys_turn = None if stored is None else _of_keys(stored)
    if stored is None or not (looped or turn or keys_turn):
        return merged(
            query, hkv, dv, _leave_keys(query, keys, values, scaling, flat, stored, visible, tail, added), None
        )
    turned = torch.empty_like(query) if keys_turn is not None else stored.turned(query).contiguous()
    dense = None
    if capacity or flat is not None or keys_turn is not None:
        making = None if keys_turn is None else (keys_turn, turned)
        dense = _leave_keys(query, keys, values, scaling, flat, None, visible, tail, None, making)
    if not capacity and flat is None:
        dense = None
    programs = PROGRAMS_EACH * _multiprocessors(query.device)
    if looped:
        mask, strides, _ = _mask_arguments(visible, keys)
        columns = None if mask is None and added is None else _columns(stored)
        seen = None if mask is None or columns is None else (mask, strides, columns)
        more = None if added is None or columns is None else (added, columns)
        of_pages = paged.leave_pages(query, stored, scaling * LOG2E, seen, programs, dv, found, more, turned)
    else:
        none = keys[:, :, :0], values[:, :, :0]
        left = _leave_keys(query, *none, scaling, None, stored, visible, None, added, turned=turned, use="pages")
        share = left.share
        of_pages = LeftOfPages(
            *left[:2], stored.cu_pages, share.page // share.unit, programs, share.tile // share.unit, share.each
        )
    return merged(query, hkv, dv, dense, of_pages._replace(turn=turn))


def _of_keys(pages: Pages) -> Turn | None:
    """What a query is turned by in the launch for other keys: where keys are in one plane of all channels, and are rotated or
    have factors, or in two that are rotated apart."""
    first = pages.keys[0]
    alike = len(pages.keys) == 1 and first.channels is None and not first.format.fourier
    return turn_of(pages.keys) if alike or rotated_apart(pages.keys) else None


def _leave_keys(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: Flat | None,
    pages: Pages | None,
    visible: Tensor | None,
    tail: Tensor | None,
    added: Tensor | None,
    making: tuple[Turn, Tensor] | None = None,
    turned: Tensor | None = None,
    use: str = "",
) -> Left:
    """What is found of the tail and of flat keys, and of pages that have no loop of their own, in one launch.

    Parameters
    ----------
    making : a map of channels, and where to leave the query after it, for a launch that comes later.
    turned : the query as the keys of ``pages`` are coded, contiguous; None if it is to be made.
    use : of the :func:`workspace`.
    """
    b, hq, q, d = query.shape
    hkv, capacity, dv = *keys.shape[1:3], values.shape[3]
    heads, rows = b * hkv, hq // hkv * q
    keys, values = _rows(keys), _rows(values)
    ragged = (None, None, None) if flat is None else (_rows(flat.keys), _rows(flat.values), flat.cu_lengths)
    mask, strides, columns = _mask_arguments(visible, keys)
    packed, planes = _packed_arguments(pages, query, visible is not None, added)
    cu_pages = None if pages is None else pages.cu_pages
    if pages is not None and turned is None:
        turned = pages.turned(query).contiguous()
    turn = Turn(None, None)
    if making is not None:
        turn, turned = making
    given = [x for x in (query, keys, values, *ragged, mask, turned, cu_pages, *packed, *turn) if x is not None]
    programs = PROGRAMS_EACH * _multiprocessors(query.device)
    types = (*[x.dtype for x in given], None if tail is None else tail.dtype)
    has = (flat is not None, tail is not None, visible is not None, pages is not None)
    shape = (hq // hkv, q, d, dv, hkv, programs)
    step = _step(
        _decode,
        query.device,
        types,
        has,
        shape,
        _capability(query.device),
        (*planes, ("TURN", turn.kind)),
        PROGRAMS_EACH,
    )
    # a program works on one head after the other, so program + head numbers what each of them has done for each
    part, part_lse = workspace(query, (programs + heads) * rows * dv, (programs + heads) * rows, use=use)
    steps = (*keys.stride()[:3], *values.stride()[:3])
    step.decode.launch(
        (programs, -(-rows // step.block_m), 1), is_even(steps, given),
        query, turned, *ragged, keys, values, tail, mask, part, part_lse, cu_pages, *packed,
        *turn, scaling * LOG2E, heads, hkv, rows, q, capacity, *steps, *strides,
        columns - capacity - (0 if flat is None else flat.width), columns - capacity, 0 if added is None else added.shape[3],
    )  # fmt: skip
    return Left(part, part_lse, (ragged[2], cu_pages, tail), capacity, step.share)


class Step(NamedTuple):
    """The first launch of a decode step, how keys are shared out, and how many rows of a head a program takes: whatever the
    lengths."""

    decode: Repeated
    share: Share
    block_m: int


@lru_cache(maxsize=256)
def _step(
    kernel: Any,
    device: torch.device,
    types: tuple[torch.dtype | None, ...],
    has: tuple[bool, bool, bool, bool],
    shape: tuple[int, ...],
    capability: int,
    planes: tuple[tuple[str, Any], ...],
    each: int,
) -> Step:
    """What is compiled for a device and types of tensors, that of the query first.

    ``has`` says which parts there are: flat keys, room in the tail, a mask, pages. ``shape`` is query heads of a key head,
    queries, channels of keys and of values, key heads, programs.
    """
    (groups, queries, d, dv, _, programs), dtype = shape, types[0]
    assert dtype is not None
    plan = launch(groups, queries, d, dv, dtype.itemsize, has[3], capability)
    share = Share(has[0], has[1], dict(planes)["PAGE"], each, UNIT, plan.constants["BLOCK_N"], programs)
    layout = {"RAGGED": share.ragged, "ROOMY": share.roomy, "EACH": share.each, "UNIT": share.unit}
    kind = {"MASKED": has[2], "SINGLE": queries == 1, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
    options = {**plan.constants, **dict(planes), **layout, **kind, "BLOCK_M": plan.block_m, **plan.options}
    return Step(Repeated(kernel, options), share, plan.block_m)


def readable(pages: Pages | None, query: Tensor, dv: int) -> bool:
    """Whether a kernel reads these pages: at most two planes of keys, one of values, tiles that a product can take."""
    if pages is None or paged.fits(pages, query, dv):
        return True
    apart = rotated_apart(pages.values) and all(of.format.axis == "token" and of.rest is None for of in pages.values)
    whole = len(pages.values) == 1 and pages.values[0].channels is None
    if not (whole or apart) or pages.summed or len(pages.keys) > 2 or pages.tile not in (16, 32, 64, 128):
        return False
    return not pages.remains or (len(pages.keys) == 1 and _adds(pages.keys[0]) and _adds(pages.values[0]))


def _adds(of: Plane) -> bool:
    """Whether a kernel adds the remainder of a plane to its codes: of few numbers, and of all channels."""
    rank, single = remainder_of(of)
    return rank <= MAX_RANK and single <= MAX_SINGLE and of.channels is None


class Launch(NamedTuple):
    """Launch settings of the first kernel: they depend on the model and the device, never on a length."""

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


def _mask_arguments(visible: Tensor | None, keys: Tensor) -> tuple[Tensor | None, tuple[int, int, int], int]:
    """The mask as bytes, its strides by sequence, key head and query, and its columns."""
    if visible is None:
        return None, (0, 0, 0), keys.shape[2]
    mask = _rows(visible)
    of_heads = mask.stride(1) if mask.shape[1] > 1 else 0
    return mask.view(torch.uint8), (mask.stride(0), of_heads, mask.stride(2)), mask.shape[3]


def _packed_arguments(
    pages: Pages | None, like: Tensor, masked: bool, added: Tensor | None
) -> tuple[list[Tensor | None], tuple[tuple[str, Any], ...]]:
    """Tensors of pages, in the order of the kernel, and what it must know of them."""
    if pages is None:
        return [None] * 27, _NO_PLANES

    def tensors(of: Plane) -> list[Tensor]:
        return [t.contiguous() for t in (of.codes, of.scale, of.scale if of.zero is None else of.zero)]

    def remainder(of: Plane) -> list[Tensor | None]:
        if of.rest is None:
            return [None] * 4
        # what there is none of is never read
        return [of.scale if part is None else part.contiguous() for part in of.rest.parts]

    first, other, value, more = pages.keys[0], pages.keys[-1], pages.values[0], pages.values[1:]
    block = max(16, triton.next_power_of_2(pages.width_of(pages.values))) if more else 0
    channels = [of.channels.contiguous() if of.channels is not None else pages.table for of in (first, other)]
    constants = {
        "PAGE": pages.page,
        "TILE": pages.tile,
        "KEY": plane(first, like.dtype),
        "OTHER": plane(other, like.dtype) if len(pages.keys) == 2 else None,
        "VALUE": plane(value, like.dtype, 0, block),
        "MORE": plane(more[0], like.dtype, value.codes.shape[2], block) if more else None,
        "ADDED": added is not None,
    }
    lists = [pages.count, pages.meta, pages.table]
    lists.append(_columns(pages) if masked or added is not None else pages.table)
    lists.append(pages.table if added is None else added)
    planes = [*tensors(first), *remainder(first), *tensors(other), *tensors(value), *remainder(value)]
    planes += tensors(more[0]) if more else [None] * 3
    return [*planes, *channels, *lists], tuple(constants.items())


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
def _owner(lengths, heads, unit, RAGGED: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr):
    """The head that owns a unit of all."""
    head, above = tl.full([], 0, tl.int32), heads
    while above - head > 1:
        middle = (head + above) // 2
        if before(lengths, middle, RAGGED, PAGE, UNIT) <= unit:
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


@jit
def _turn(
    query, turned, factor, rotation, first_channels, heads, rows, TURN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Leave rows of the query as keys are coded: multiplied by the factors of their head, and rotated."""
    ONCE: tl.constexpr = 8192 // BLOCK_D if BLOCK_D > 64 else BLOCK_D
    d = tl.arange(0, BLOCK_D)
    first = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    for at in range(first, heads * rows, tl.num_programs(0) * tl.num_programs(1)):
        number = tl.zeros([], tl.int64) + at
        own = number * D
        q = tl.load(query + own + d, mask=d < D, other=0.0)
        if TURN[0] & 1:
            of_head = number // rows * D
            q = (q.to(tl.float32) * tl.load(factor + of_head + d, mask=d < D, other=0.0).to(tl.float32)).to(q.dtype)
        if TURN[0] & 2:
            column = d
            if TURN[1]:
                column = place_of(first_channels, number // rows, d, TURN[1])
            for start in tl.static_range(0, BLOCK_D, ONCE):
                to = start + tl.arange(0, ONCE)
                there = (to < D)[:, None] & (d < D)[None, :]
                line = to
                if TURN[1]:
                    line = place_of(first_channels, number // rows, to, TURN[1])
                part = tl.load(rotation + line[:, None] * D + column[None, :], mask=there, other=0.0)
                made = tl.sum(part * q.to(tl.float32)[None, :], 1)
                tl.store(turned + own + to, made.to(q.dtype), mask=to < D)
        else:
            tl.store(turned + own + d, q, mask=d < D)


@jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The softmax over no keys: the highest logit, the sum and the output of every row."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return highest, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)


@jit
def _remainder(left, right, single, place, instead, PLANE: tl.constexpr):
    """What is added to the codes of a plane; where that is nothing any address ``instead`` will do."""
    if PLANE[14] + PLANE[15] > 0:
        return left, right, single, place
    else:
        return instead, instead, instead, instead


@jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=["filled"])
def _decode(
    query, turned, flat_keys, flat_values, cu_lengths, keys, values, filled, mask, part, part_lse, cu_pages, key_codes,
    key_scale, key_zero, key_left, key_right, key_single, key_place, other_codes, other_scale, other_zero, value_codes,
    value_scale, value_zero, value_left, value_right, value_single, value_place, more_codes, more_scale, more_zero, channels,
    other_channels, count, meta, table, columns, added, factor, rotation, first_channels, scale, heads, kv_heads, rows,
    queries, capacity, key_b, key_h, key_n, value_b, value_h, value_n, mask_b, mask_h, mask_q, flat_column, tail_column,
    added_step,
    RAGGED: tl.constexpr, ROOMY: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr, EACH: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    KEY: tl.constexpr, OTHER: tl.constexpr, VALUE: tl.constexpr, MORE: tl.constexpr, ADDED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """One share of all keys: for every head in it, attention over its part of the share, and its log-sum-exp. With ``TURN``
    also a share of the query's rows is turned, for a later launch."""
    program = tl.program_id(0)
    if TURN[0]:
        _turn(query, turned, factor, rotation, first_channels, heads, rows, TURN, D, BLOCK_D)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    tail = filled_of(filled, capacity, ROOMY)
    lengths = (cu_lengths, cu_pages, tl.cdiv(tail, UNIT))
    all_units = before(lengths, heads, RAGGED, PAGE, UNIT)
    share = share_of(all_units, tl.num_programs(0), EACH, BLOCK_N, UNIT)
    first = program * share
    last = tl.minimum(first + share, all_units)
    head = _owner(lengths, heads, first, RAGGED, PAGE, UNIT)
    while first < last:
        begin = before(lengths, head, RAGGED, PAGE, UNIT)
        end = before(lengths, head + 1, RAGGED, PAGE, UNIT)
        unit, units = first - begin, tl.minimum(last, end) - begin
        b, h = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
        state = _nothing(BLOCK_M, BLOCK_DV)
        # without a mask any address will do
        visible = query
        if MASKED:
            visible = mask + b * mask_b + h * mask_h
        if PAGE:
            packed = tl.load(cu_pages + head)
            own_pages = tl.load(cu_pages + head + 1) - packed
            more = added
            if ADDED:
                more = added + (head.to(tl.int64) * rows + row) * added_step
            of_key = _remainder(key_left, key_right, key_single, key_place, channels, KEY)
            of_value = _remainder(value_left, value_right, value_single, value_place, channels, VALUE)
            second = (channels,) * 3
            if MORE is not None:
                second = (more_codes, more_scale, more_zero)
            state = attend_pages(
                state, turned + (head.to(tl.int64) * rows + row)[:, None] * D, head, row < rows,
                (key_codes, key_scale, key_zero, of_key), (other_codes, other_scale, other_zero, of_key),
                (value_codes, value_scale, value_zero, of_value), (second[0], second[1], second[2], of_value),
                (channels, other_channels),
                (count, meta, table, columns, more), packed, own_pages, visible, mask_q, row, queries,
                # a page is read by the program that has its first unit
                tl.cdiv(unit, PAGE // UNIT), tl.cdiv(units, PAGE // UNIT), scale,
                MASKED, SINGLE, PRECISION, D, PAGE, TILE, KEY, OTHER, VALUE, MORE, ADDED,
            )  # fmt: skip
            own_units = own_pages * (PAGE // UNIT)
            unit, units = tl.maximum(unit - own_units, 0), units - own_units
            begin += own_units
        # not before the pages, which need its registers
        at = query + (head.to(tl.int64) * rows + row)[:, None] * D + d[None, :]
        q = tl.load(at, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)
        flat_units = end - begin - tl.cdiv(tail, UNIT)
        if RAGGED:
            start = tl.load(cu_lengths + head).to(tl.int64)
            length = (tl.load(cu_lengths + head + 1) - start).to(tl.int32)
            state = attend(
                state, q, flat_keys + start * D, flat_values + start * DV, D, DV, visible + flat_column, mask_q, row,
                queries, unit * UNIT, tl.minimum(units * UNIT, length), length, scale,
                MASKED, SINGLE, PRECISION, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        state = attend(
            state, q, keys + b * key_b + h * key_h, values + b * value_b + h * value_h, key_n, value_n,
            visible + tail_column, mask_q, row, queries, tl.maximum(unit - flat_units, 0) * UNIT,
            tl.minimum((units - flat_units) * UNIT, tail), tail - queries + 1, scale,
            MASKED, SINGLE, PRECISION, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        _leave(state, part, part_lse, program, head, row, rows, DV, BLOCK_DV)
        first, head = begin + units, head + 1
