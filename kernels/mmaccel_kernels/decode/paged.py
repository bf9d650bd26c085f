"""Attention over packed pages alone, by a loop with few instructions a byte; what it finds is merged with the rest of a cache.

Keys are the rows of the first product (``S^T = K Q^T``) and channels those of the second (``O^T = V^T P^T``), so that a group
of query heads fills eight columns. Each of four warps has a quarter of every page and a softmax of its own: the loop reads
bytes into the registers in which the matrix instruction wants them, and nothing goes from warp to warp before its end.

A code is a number already: as bits of float16, ``c 2^k`` is the subnormal number ``c 2^(k - 24)``, which tensor cores multiply
exactly (Fasi et al. 2021, *Numerical behavior of NVIDIA tensor cores*). So two codes become an operand by one AND, and where in
a byte they stood is a factor of their tokens. Scales never meet codes: those of keys by channel are multiplied into the query,
those of values by token into the weights, and zero points are products of their own. The query has a power of two taken off,
so that no scale carries it beyond float16. In float32 codes are numbers, and the rest is the same.

Where there is a loop in CUDA C++ for the pages (:mod:`.cuda`) and it agrees with the definition on a few of them, asked once a
device, it is launched instead of Triton's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from ..launch import Unbuildable, enqueue, workspace
from ..pages import Pages, Plane, paged
from ..pages.triton import plane
from . import cuda
from .merge import LeftOfPages, merged
from .naive import decode_attention_definition

#: tokens of a page are shared by this many warps
WARPS = 4

#: bytes of pages on their way, and of the one that is worked on: two blocks share a multiprocessor
AHEAD = 76 * 1024

LOG2E = math.log2(math.e)

#: bytes, their strides by sequence, key head and query, and the first column of every page
Mask = tuple[Tensor, tuple[int, int, int], Tensor]

#: arguments that change with the lengths: nothing is compiled for their values
_CHANGING = ["heads", "rows", "queries", "mask_b", "mask_h", "mask_q", "added_step"]


def fits(pages: Pages | None, query: Tensor, width: int) -> bool:
    """Whether these pages can be read so, for values of ``width`` channels: whole groups and bytes for every warp."""
    if pages is None or not paged() or len(pages.keys) != 1 or len(pages.values) != 1:
        return False
    share, (key,), (value,) = pages.page // WARPS, pages.keys, pages.values
    if key.rest is not None or value.rest is not None:
        return False
    stored = torch.float32 if query.dtype == torch.float32 else torch.float16
    return (
        pages.page % (16 * WARPS) == 0
        and share & (share - 1) == 0
        and all(_whole(of, share, pages.tile) and of.scale.dtype == stored for of in (key, value))
        and key.codes.shape[2] % 16 == 0
        and (key.format.axis == "channel" or key.format.group == key.codes.shape[2])
        and value.channels is None
        and width in (32, 64, 128, 256)
        and (value.format.axis == "channel" or value.format.group == width or value.format.interleaved(width))
        and exact(query.device)
    )


@cache
def exact(device: torch.device) -> bool:
    """Whether products on ``device`` take subnormal numbers for what they are; a device is asked once."""
    if device.type != "cuda":
        return True
    sums = torch.empty(16, 8, device=device)
    try:
        enqueue(_sums_of_codes, (1,), sums, num_warps=WARPS)
    except Unbuildable:
        return False
    return bool((sums == 120).all())


@jit
def _sums_of_codes(sums):
    """The sum of the codes 0 to 15, ``[16, 8]`` times."""
    i = tl.arange(0, 16)
    codes = (i[None, :] + i[:, None] * 0).to(tl.int16).to(tl.float16, bitcast=True)
    products = tl.dot(codes, tl.full([16, 8], 1.0, tl.float16))
    tl.store(sums + i[:, None] * 8 + tl.arange(0, 8)[None, :], products * 16777216.0)


def _whole(of: Plane, share: int, tile: int) -> bool:
    """Whether bytes and groups of tokens do not cross from warp to warp."""
    form = of.format
    if form.code == "ternary" or form.by_book or form.three_bits or (form.axis == "channel" and form.group % share):
        return False
    return form.digits == 1 or (tile >= 8 and share % (tile * form.digits) == 0)


def leave_pages(
    query: Tensor,
    pages: Pages,
    scale: float,
    mask: Mask | None,
    programs: int,
    dv: int,
    found: cuda.Loop | None,
    added: tuple[Tensor, Tensor] | None = None,
    turned: Tensor | None = None,
) -> LeftOfPages:
    """Attention over ``pages``, in one launch; the rest of a cache is :func:`.merge.merged` with it.

    Parameters
    ----------
    query : ``[B, Hq, q, D]``.
    scale : of the logits, to base 2.
    mask : bytes, its strides by sequence, key head and query, and the first column of every page.
    programs : two a multiprocessor.
    added : of :func:`.decode_attention`, and the first column of every page.
    found : the loop in CUDA C++ (:func:`loop`), or None for Triton's, which only takes pages that :func:`fits` says it does.
    turned : the query as keys are coded, contiguous; None if it is to be made.
    """
    b, hq, q, _ = query.shape
    heads, rows = b * pages.heads, hq // pages.heads * q
    turned = pages.turned(query).contiguous() if turned is None else turned
    if found is not None:
        programs = programs * found.each // 2
    part, part_lse = workspace(query, (programs + heads) * rows * dv, (programs + heads) * rows, use="pages")
    if found is None:
        _enqueue_loop(turned, pages, scale, mask, programs, part, part_lse, dv, added)
    else:
        arguments, _held = cuda.arguments(turned, pages, scale, mask, part, part_lse, rows)
        found.start((programs, -(-rows // cuda.COLUMNS)), arguments)
    return LeftOfPages(part, part_lse, pages.cu_pages, 1 if found is None else found.units, programs)


def _enqueue_loop(
    query: Tensor,
    pages: Pages,
    scale: float,
    mask: Mask | None,
    programs: int,
    part: Tensor,
    part_lse: Tensor,
    dv: int,
    added: tuple[Tensor, Tensor] | None,
) -> None:
    """Launch Triton's loop over pages for a query that is turned and contiguous."""
    b, hq, q, d = query.shape
    rows = hq // pages.heads * q
    block = 8 if rows <= 8 else 16
    key, value = pages.keys[0], pages.values[0]
    size = sum(x[:1].nbytes for of in (key, value) for x in (of.codes, of.scale, of.zero) if x is not None)
    # first comes where a page is, then what it holds: a page is two stages
    stages = 1 + 2 * max(1, min(3, AHEAD // max(size, 1)))
    bytes_, strides, columns = mask or (query, (0, 0, 0), pages.table if added is None else added[1])
    more = query if added is None else added[0]
    enqueue(
        _attend, (programs, triton.cdiv(rows, block)),
        query, bytes_, part, part_lse, pages.cu_pages, *_tensors(key), *_tensors(value),
        pages.table if key.channels is None else key.channels.contiguous(), pages.count, pages.meta, pages.table,
        columns, more, scale, b * pages.heads, pages.heads, rows, q, *strides, more.shape[3],
        ADDED=added is not None, MASKED=mask is not None, SINGLE=q == 1, PART=key.channels is not None, D=d, DV=dv, N=block,
        PAGE=pages.page, TILE=pages.tile, KEY=plane(key, query.dtype), VALUE=plane(value, query.dtype),
        HALF=query.dtype != torch.float32, STAGES=stages, num_warps=WARPS, num_stages=stages,
    )  # fmt: skip


# --- the loop in CUDA C++ ---------------------------------------------------------------------------------------------
#: kind of pages and queries, device -> the loop in CUDA C++, if there is one and it is right there
_loops: dict[tuple[Hashable, ...], cuda.Loop | None] = {}


def loop(pages: Pages, query: Tensor, masked: bool) -> cuda.Loop | None:
    """The loop in CUDA C++ for such pages; None where one in Triton is to be launched."""
    planes = tuple(
        (of.format, of.codes.shape[2], of.scale.dtype, of.channels is None) for of in (*pages.keys, *pages.values)
    )
    shape = (query.dtype, query.shape[1] // pages.heads, *query.shape[2:])
    kind = (query.device, pages.page, pages.tile, planes, shape, masked)
    if kind not in _loops:
        # nothing can be compared while a graph is captured
        if query.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        try:
            found = cuda.loop(pages, query, masked)
        except Unbuildable:
            found = None
        _loops[kind] = found if found is not None and _agrees(found, pages, query, masked) else None
    return _loops[kind]


def _agrees(found: cuda.Loop, pages: Pages, query: Tensor, masked: bool) -> bool:
    """Whether a loop says what the definition does of a few pages of this kind."""
    query, few, visible = _sample(pages, query)
    none = query.new_empty(1, few.heads, 0, query.shape[3])
    values = query.new_empty(1, few.heads, 0, few.values[0].codes.shape[2])
    mask = None
    if masked:
        first = torch.tensor([0, few.page, 0], dtype=torch.int32, device=query.device)
        mask = (visible.view(torch.uint8), (visible.stride(0), visible.stride(1), visible.stride(2)), first)
    left = leave_pages(query, few, LOG2E / 16, mask, 3, values.shape[3], found)
    out, lse = merged(query, few.heads, values.shape[3], None, left)
    want, want_lse = decode_attention_definition(
        query, none, values, 1 / 16, pages=few, visible=visible if masked else None
    )
    return bool(((out - want).abs().max() <= 0.02 * want.abs().max()) & ((lse - want_lse).abs().max() <= 0.05))


def _sample(pages: Pages, query: Tensor) -> tuple[Tensor, Pages, Tensor]:
    """A query, two pages of a head and one that is not full of another, of such a kind, and what may be seen of them."""
    rng, device = torch.Generator().manual_seed(0), query.device

    def plane_like(of: Plane, first: int = 0) -> Plane:
        codes = torch.randint(256, (3, *of.codes.shape[1:]), generator=rng, dtype=torch.uint8)
        scale = ((1 + torch.rand(3, *of.scale.shape[1:], generator=rng)) / of.format.levels).to(of.scale.dtype)
        zero = torch.randn(scale.shape, generator=rng).to(device, scale.dtype) if of.zero is not None else None
        channels = numbers(*range(first, first + of.codes.shape[2])).expand(2, -1) if of.channels is not None else None
        return Plane(of.format, codes.to(device), scale.to(device), zero, channels)

    def numbers(*given: int) -> Tensor:
        return torch.tensor(given, dtype=torch.int32, device=device)

    few = replace(
        pages,
        # a second plane has the channels that the first has not
        keys=tuple(plane_like(of, place * pages.keys[0].codes.shape[2]) for place, of in enumerate(pages.keys)),
        values=tuple(map(plane_like, pages.values)),
        count=numbers(pages.page, pages.page, pages.page // 2 + 3),
        meta=numbers(0, 1, 2),
        table=numbers(0, 1, 2),
        cu_pages=numbers(0, 2, 3),
        heads=2,
        tokens=None,
    )
    groups, (q, d) = query.shape[1] // pages.heads, query.shape[2:]
    asked = torch.randn(1, 2 * groups, q, d, generator=rng).to(device, query.dtype)
    visible = torch.rand(1, 2, q, 2 * pages.page, generator=rng) < 0.7
    return asked, few, visible.to(device)


def _tensors(of: Plane) -> list[Tensor]:
    """Codes by words of four, scales and zero points; those of float16 that stand channel by channel by words of two."""
    scales = [x.contiguous() for x in (of.scale, of.scale if of.zero is None else of.zero)]
    if of.format.axis == "channel" and of.scale.dtype == torch.float16:
        scales = [x.view(torch.int32) for x in scales]
    return [of.codes.contiguous().view(torch.int32), *scales]


# --- codes ------------------------------------------------------------------------------------------------------------
@jit
def _halves(word, HALF: tl.constexpr, BITS: tl.constexpr):
    """Both halves of words as a last axis of numbers: the ``BITS`` of float16, or in float32 whole numbers."""
    if HALF or BITS:
        low = word.to(tl.int16).to(tl.float16, bitcast=True)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        if not HALF:
            low, high = low.to(tl.float32), high.to(tl.float32)
    else:
        low, high = (word & 0xFFFF).to(tl.float32), ((word >> 16) & 0xFFFF).to(tl.float32)
    return tl.join(low, high)


@jit
def _four(word, STEP: tl.constexpr, MASK: tl.constexpr):
    """Four fields of words, ``STEP`` bits apart and left where they are, as a last axis."""
    even = tl.join(word & MASK, word & (MASK << (2 * STEP)))
    odd = tl.join(word & (MASK << STEP), word & (MASK << (3 * STEP)))
    return tl.join(even, odd).reshape(word.shape + [4])


@jit
def _fields(word, COUNT: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr):
    """``COUNT`` fields of words, ``STEP`` bits apart and left where they are, as a last axis."""
    if COUNT == 1:
        fields = tl.expand_dims(word & MASK, -1)
    elif COUNT == 2:
        fields = tl.join(word & MASK, word & (MASK << STEP))
    elif COUNT == 4:
        fields = _four(word, STEP, MASK)
    else:
        fields = tl.join(_four(word, 2 * STEP, MASK), _four(word, 2 * STEP, MASK << STEP)).reshape(word.shape + [8])
    return fields


@jit
def _numbers(word, COUNT: tl.constexpr, STEP: tl.constexpr, PLANE: tl.constexpr, HALF: tl.constexpr):
    """``[..., COUNT, 2]``: codes in the lower byte of either half of words; of fp8, a 256th of their value."""
    if PLANE[0] == "fp8":
        bits = tl.expand_dims(((word << 8) & -2147450880) | ((word << 7) & 0x3F803F80), -1)
    else:
        bits = _fields(word, COUNT, STEP, ((1 << (8 // PLANE[1])) - 1) * 0x00010001)
    return _halves(bits, HALF, PLANE[0] == "fp8")


@jit
def _lanes(ROWS: tl.constexpr, V: tl.constexpr):
    """Of ``[4 ROWS, 32 V]`` words: the warp and the row that have them, group and place in it of the thread, and the word."""
    r, c = tl.arange(0, 4 * ROWS), tl.arange(0, 32 * V)
    return r % 4, r // 4, c // (4 * V), (c // V) % 4, c % V


@jit
def _key_words(PLANE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr):
    """Where in a page of keys the words are, ``[4 ROWS, 32 V]``, and which are no padding."""
    V: tl.constexpr = 4 if PLANE[7] >= 64 else PLANE[7] // 16
    J: tl.constexpr = 1 if PLANE[7] <= 64 else PLANE[7] // 64
    EACH: tl.constexpr = SHARE // PLANE[1]
    warp, row, group, t, i = _lanes(EACH // 8 * J, V)
    token = (warp * EACH + row // J * 8)[:, None] + group[None, :]
    run = (row % J)[:, None] + (t * J)[None, :]
    return token * (PLANE[6] // 4) + run * V + i[None, :], run * (4 * V) < PLANE[6]


@jit
def _key_numbers(word, PLANE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr, HALF: tl.constexpr):
    """``[4, SHARE, BLOCK]``: codes of every warp's tokens, in the order of :func:`_in_order`, times the place in the byte."""
    DIGITS: tl.constexpr = PLANE[1]
    V: tl.constexpr = 4 if PLANE[7] >= 64 else PLANE[7] // 16
    J: tl.constexpr = 1 if PLANE[7] <= 64 else PLANE[7] // 64
    T: tl.constexpr = TILE if DIGITS > 1 else SHARE
    x = _numbers(tl.join(word, word >> 8), DIGITS, 8 // DIGITS, PLANE, HALF)
    # block, eighth of a tile, run of words, warp, group, thread, word, parity of the byte, digit, byte
    x = x.reshape([SHARE // (T * DIGITS), T // 8, J, 4, 8, 4, V, 2, DIGITS, 2])
    return tl.permute(x, [3, 0, 8, 1, 4, 2, 6, 5, 7, 9]).reshape([4, SHARE, PLANE[7]])


@jit
def _in_order(x):
    """Channels ``[W, BLOCK]`` in the order in which threads have the codes of keys."""
    W: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    V: tl.constexpr = 4 if BLOCK >= 64 else BLOCK // 16
    J: tl.constexpr = 1 if BLOCK <= 64 else BLOCK // 64
    return tl.permute(x.reshape([W, 4, J, V, 2, 2]), [0, 2, 3, 1, 5, 4]).reshape([W, BLOCK])


@jit
def _value_words(PLANE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr):
    """Where in a page of values the words are, ``[4 ROWS, 32 V]``."""
    DIGITS: tl.constexpr = PLANE[1]
    V: tl.constexpr = 4 if PLANE[7] >= 128 else PLANE[7] // 32
    E: tl.constexpr = 1 if PLANE[7] <= 128 else PLANE[7] // 128
    T: tl.constexpr = TILE if DIGITS > 1 else SHARE
    X: tl.constexpr = 2 if T >= 16 else 1
    H: tl.constexpr = T // (8 * X)
    EACH: tl.constexpr = SHARE // DIGITS
    warp, row, group, t, i = _lanes(SHARE // (T * DIGITS) * H * E * X * 2, V)
    ahead, own = row // (2 * X * E), row % (2 * X)
    token = (warp * EACH + (ahead // H) * T + (ahead % H) * (8 * X) + own)[:, None] + (2 * X * t)[None, :]
    return token * (PLANE[6] // 4) + (row // (2 * X) % E * V)[:, None] + (group * (E * V) + i)[None, :]


@jit
def _value_numbers(word, PLANE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr, HALF: tl.constexpr):
    """``[4, DV, SHARE]``: codes of every warp's tokens, in the order of :func:`_turned`, times the place in the byte; channel
    ``l`` of each of the eight groups of threads comes before channel ``l + 1`` of any."""
    DIGITS: tl.constexpr = PLANE[1]
    V: tl.constexpr = 4 if PLANE[7] >= 128 else PLANE[7] // 32
    E: tl.constexpr = 1 if PLANE[7] <= 128 else PLANE[7] // 128
    T: tl.constexpr = TILE if DIGITS > 1 else SHARE
    X: tl.constexpr = 2 if T >= 16 else 1
    H: tl.constexpr = T // (8 * X)
    ROWS: tl.constexpr = SHARE // (T * DIGITS) * H * E
    first, second = tl.split(tl.permute(word.reshape([ROWS, X, 2, 4, 32 * V]), [0, 1, 3, 4, 2]))
    # two tokens of a channel in every half of a word
    x = tl.join((first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536))
    x = _numbers(tl.join(x, x >> 8), DIGITS, 8 // DIGITS, PLANE, HALF)
    # block, 16 tokens, run of words, two tokens, warp, group, thread, word, two halves, parity of the byte, digit, token
    x = x.reshape([SHARE // (T * DIGITS), H, E, X, 4, 8, 4, V, 2, 2, DIGITS // (3 - X), 3 - X, 2])
    return tl.permute(x, [4, 2, 7, 8, 9, 5, 0, 10, 1, 6, 11, 3, 12]).reshape([4, PLANE[7], SHARE])


@jit
def _turned(x, PLANE: tl.constexpr, TILE: tl.constexpr):
    """Tokens ``[4, SHARE, N]`` in the order in which threads have the codes of values: in tiles of 8 two digits come before the
    next rows."""
    if TILE == 8 and PLANE[1] > 1:
        SHARE: tl.constexpr = x.shape[1]
        N: tl.constexpr = x.shape[2]
        x = tl.permute(x.reshape([4, SHARE // 16, 2, 4, 2, N]), [0, 1, 3, 2, 4, 5]).reshape([4, SHARE, N])
    return x


@jit
def _unit(PLANE: tl.constexpr, HALF: tl.constexpr):
    """What numbers are to be multiplied by to be codes."""
    return 256.0 if PLANE[0] == "fp8" else 16777216.0 if HALF else 1.0


@jit
def _lift(HALF: tl.constexpr):
    """What weights times scales of tokens are lifted by, so that small ones are no subnormal numbers with few digits."""
    return 64.0 if HALF else 1.0


@jit
def _place(PLANE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr):
    """``[SHARE]``: the inverse of the factor that a code has by its place in the byte."""
    digit = tl.arange(0, SHARE) // TILE % PLANE[1]
    return tl.exp2(-(digit * (8 // PLANE[1])).to(tl.float32))


# --- scales -----------------------------------------------------------------------------------------------------------
@jit
def _of_channels(pointer, at, PLANE: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr, HALF: tl.constexpr):
    """``[4, BLOCK]``: scales or zero points of the channels in the group of tokens of every warp."""
    BLOCK: tl.constexpr = PLANE[7]
    warp = tl.arange(0, 4)
    row = at * (PAGE // PLANE[3]) + warp * SHARE // PLANE[3]
    if HALF:
        d = tl.arange(0, BLOCK // 2)
        place = row[:, None] * (PLANE[6] // 2) + d[None, :]
        if PLANE[6] == BLOCK:
            found = tl.load(pointer + place)
        else:
            found = tl.load(pointer + place, mask=(2 * d < PLANE[6])[None, :], other=0)
        scales = _halves(found, True, True).reshape([4, BLOCK])
    else:
        d = tl.arange(0, BLOCK)
        scales = tl.load(pointer + row[:, None] * PLANE[6] + d[None, :], mask=(d < PLANE[6])[None, :], other=0.0)
    return scales


@jit
def _logits(
    number, operand, factor, summed, scale, zero, at, inside,
    PLANE: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """``[4, SHARE, N]``, from codes and the query ``operand [4, BLOCK, N]``, whose products with numbers are to be multiplied
    by ``factor [SHARE, N]``, with channels by ``factor`` of place and unit 1; ``summed [N]`` are its own sums."""
    N: tl.constexpr = operand.shape[2]
    PRECISION: tl.constexpr = "tf32" if HALF else "ieee"
    by_place, by_row = factor
    if PLANE[2]:
        scales = _of_channels(scale, at, PLANE, PAGE, SHARE, HALF)
        if PLANE[5]:
            zeros = _of_channels(zero, at, PLANE, PAGE, SHARE, HALF)
        else:
            zeros = scales * (-PLANE[4])
        logits = tl.dot(number, operand * _in_order(scales)[:, :, None], input_precision=PRECISION)
        zeros = tl.broadcast_to(_in_order(zeros)[:, None, :], [4, 8, PLANE[7]])
        # half of the rows are empty: they would only be copies
        rows = tl.permute(tl.join(zeros, tl.zeros_like(zeros)), [0, 3, 1, 2]).reshape([4, 16, PLANE[7]])
        added = tl.dot(rows, operand, input_precision=PRECISION)
        added, _ = tl.split(tl.permute(added.reshape([4, 2, 8, N]), [0, 2, 3, 1]))
        added = tl.broadcast_to((added * by_row[None, None, :])[:, None], [4, SHARE // 8, 8, N]).reshape([4, SHARE, N])
        logits = logits * by_place[None, :, :] + added
    else:
        place = at * PAGE + inside
        scales = tl.load(scale + place).to(tl.float32)
        logits = tl.dot(number, operand, input_precision=PRECISION) * by_place[None, :, :] * scales[:, :, None]
        if PLANE[5]:
            zeros = tl.load(zero + place).to(tl.float32)
            logits += zeros[:, :, None] * summed[None, None, :]
        elif PLANE[4] > 0:
            logits -= PLANE[4] * scales[:, :, None] * summed[None, None, :]
    return logits


@jit
def _of_groups(pointer, at, inside, PLANE: tl.constexpr, PAGE: tl.constexpr):
    """``[4, SHARE, GROUPS]``: scales or zero points of every warp's tokens, ``inside [4, SHARE]`` of the page."""
    GROUPS: tl.constexpr = PLANE[6] // PLANE[3]
    place = (at * PAGE + inside) * GROUPS
    return tl.load(pointer + place[:, :, None] + tl.arange(0, GROUPS)[None, None, :])


@jit
def _by_threads(x):
    """Channels ``[4, DV]`` in the order of :func:`_value_numbers`."""
    return tl.permute(x.reshape([4, 8, x.shape[1] // 8]), [0, 2, 1]).reshape([4, x.shape[1]])


@jit
def _with_values(
    number, p, by_place, acc, sums, scale, zero, at, inside,
    PLANE: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """``acc [4, DV, N]`` with codes weighed by ``p [4, SHARE, N]`` times ``by_place``, and ``sums [4, 16, N]``: in the upper 8
    rows those of ``p``, in the lower those with the zero points of groups of channels."""
    N: tl.constexpr = p.shape[2]
    DV: tl.constexpr = PLANE[7]
    PRECISION: tl.constexpr = "tf32" if HALF else "ieee"
    ones = tl.full([4, 8, SHARE], 1.0, p.dtype)
    if PLANE[2]:
        rows = tl.permute(tl.join(ones, ones), [0, 3, 1, 2]).reshape([4, 16, SHARE])
        added = tl.dot(rows, p, input_precision=PRECISION)
        sums += added
        scales = _of_channels(scale, at, PLANE, PAGE, SHARE, HALF)
        if PLANE[5]:
            zeros = _of_channels(zero, at, PLANE, PAGE, SHARE, HALF)
        else:
            zeros = scales * (-PLANE[4])
        products = tl.dot(number, p * by_place, input_precision=PRECISION)
        acc += products * (_by_threads(scales).to(tl.float32) * _unit(PLANE, HALF))[:, :, None]
        every = tl.broadcast_to(added[:, None], [4, DV // 16, 16, N]).reshape([4, DV, N])
        acc += every * _by_threads(zeros).to(tl.float32)[:, :, None]
    else:
        GROUPS: tl.constexpr = DV // PLANE[3]
        scales = _of_groups(scale, at, inside, PLANE, PAGE)
        if PLANE[5]:
            zeros = _of_groups(zero, at, inside, PLANE, PAGE)
        else:
            zeros = scales * (-PLANE[4])
        zeros = tl.permute(zeros, [0, 2, 1])[:, None]
        zeros = tl.broadcast_to(zeros, [4, 8 // GROUPS, GROUPS, SHARE]).reshape([4, 8, SHARE])
        rows = tl.permute(tl.join(ones, zeros), [0, 3, 1, 2]).reshape([4, 16, SHARE])
        sums = tl.dot(rows, p, sums, input_precision=PRECISION)
        operand = (p * by_place)[None] * tl.permute(scales, [2, 0, 1])[:, :, :, None]
        number = tl.permute(number.reshape([4, GROUPS, PLANE[3], SHARE]), [1, 0, 2, 3])
        acc = tl.permute(acc.reshape([4, GROUPS, PLANE[3], N]), [1, 0, 2, 3]).reshape([GROUPS * 4, PLANE[3], N])
        number = number.reshape([GROUPS * 4, PLANE[3], SHARE])
        acc = tl.dot(number, operand.reshape([GROUPS * 4, SHARE, N]), acc, input_precision=PRECISION)
        acc = tl.permute(acc.reshape([GROUPS, 4, PLANE[3], N]), [1, 0, 2, 3]).reshape([4, DV, N])
    return acc, sums


# --- the loop ---------------------------------------------------------------------------------------------------------
@jit
def _operand(
    query, channels, head, rows, row, scale, KEY: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr
):
    """The query ``[4, BLOCK, N]`` in the order of codes, and in float32 what products with it are to be multiplied by and its
    sums times that, ``[N]``."""
    d = tl.arange(0, KEY[7])
    channel = d
    if PART:
        channel = tl.load(channels + head.to(tl.int64) * KEY[6] + d, mask=d < KEY[6], other=0)
    at = query + (head.to(tl.int64) * rows + row)[:, None] * D + channel[None, :]
    q = tl.load(at, mask=(row < rows)[:, None] & (d < KEY[6])[None, :], other=0.0).to(tl.float32)
    by_row = tl.zeros_like(tl.sum(q, 1)) + scale
    if HALF:
        # a power of two of which all channels are less than a half
        most = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000
        unit = tl.where(most > 0, most, 0x3F800000).to(tl.float32, bitcast=True) * 4.0
        q = (q / unit[:, None]).to(tl.float16)
        by_row *= unit
    summed = tl.sum(q.to(tl.float32), 1) * by_row
    return tl.broadcast_to(tl.trans(_in_order(q))[None], [4, KEY[7], q.shape[0]]) * 0.5, by_row * 2, summed


@jit
def _owner(cu_pages, heads, page):
    """The head that owns a page of all."""
    head, above = tl.full([], 0, tl.int32), heads
    while above - head > 1:
        middle = (head + above) // 2
        if tl.load(cu_pages + middle) <= page:
            head = middle
        else:
            above = middle
    return head


@jit
def _seen(mask, mask_step, column, stored, row, queries, MASKED: tl.constexpr, SINGLE: tl.constexpr):
    """Which tokens ``[4, SHARE]`` the queries see, ``[4, SHARE, 1 or N]``."""
    if MASKED and SINGLE:
        seen = (tl.load(mask + column, mask=stored, other=0) != 0)[:, :, None]
    elif MASKED:
        at = column[:, :, None] + ((row % queries) * mask_step)[None, None, :]
        seen = tl.load(mask + at, mask=stored[:, :, None] & (row >= 0)[None, None, :], other=0) != 0
    else:
        seen = stored[:, :, None]
    return seen


@jit
def _leave(
    state, part, part_lse, slot, rows, row, HALF: tl.constexpr, DV: tl.constexpr, VALUE: tl.constexpr
):  # fmt: skip
    """Put together what the warps have found of a head, and store it: attention, and its log-sum-exp to base 2."""
    highest, acc, sums = state
    N: tl.constexpr = highest.shape[1]
    top = tl.max(highest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(highest - base[None, :])[:, None, :]
    acc, sums = tl.sum(acc * weight, 0), tl.sum(sums * weight, 0)
    total = tl.sum(tl.where((tl.arange(0, 16) == 0)[:, None], sums, 0.0), 0)
    place = tl.arange(0, DV)
    if VALUE[2]:
        channel = place % 8 * (DV // 8) + place // 8
    else:
        GROUPS: tl.constexpr = DV // VALUE[3]
        RUN: tl.constexpr = VALUE[3] // 8
        lower = (tl.arange(0, 16 // GROUPS) == 8 // GROUPS)[:, None, None]
        zeros = tl.sum(tl.where(lower, sums.reshape([16 // GROUPS, GROUPS, N]), 0.0), 0)
        acc = acc.reshape([GROUPS, VALUE[3], N]) * (_unit(VALUE, HALF) / _lift(HALF)) + zeros[:, None, :]
        acc = acc.reshape([DV, N])
        channel = place // VALUE[3] * VALUE[3] + place % 8 * RUN + place % VALUE[3] // 8
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[None, :]
    at = slot.to(tl.int64) * rows + row
    tl.store(part + at[None, :] * DV + channel[:, None], acc, mask=(row < rows)[None, :] & (channel >= 0)[:, None])
    tl.store(part_lse + at, tl.where(some, base + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=row < rows)


@jit(do_not_specialize=_CHANGING)
def _attend(
    query, mask, part, part_lse, cu_pages, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
    channels, count, meta, table, columns, added, scale, heads, kv_heads, rows, queries, mask_b, mask_h, mask_q,
    added_step, ADDED: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr, PART: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HALF: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One share of all pages: for every head in it, attention over its part of the share, and its log-sum-exp."""
    SHARE: tl.constexpr = PAGE // 4
    KEY_WORDS: tl.constexpr = PAGE // KEY[1] * KEY[6] // 4
    VALUE_WORDS: tl.constexpr = PAGE // VALUE[1] * VALUE[6] // 4
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.float32
    program = tl.program_id(0)
    row = tl.program_id(1) * N + tl.arange(0, N)
    pages = tl.load(cu_pages + heads)
    share = tl.cdiv(pages, tl.num_programs(0))
    first = program * share
    last = tl.minimum(first + share, pages)
    head = _owner(cu_pages, heads, first)
    key_words, there = _key_words(KEY, TILE, SHARE)
    value_words = _value_words(VALUE, TILE, SHARE)
    inside = (tl.arange(0, 4) * SHARE)[:, None] + tl.arange(0, SHARE)[None, :]
    inside_values = _turned(inside[:, :, None], VALUE, TILE).reshape([4, SHARE])
    key_place = _place(KEY, TILE, SHARE) * _unit(KEY, HALF)
    value_place = _place(VALUE, TILE, SHARE) if VALUE[2] else _place(VALUE, TILE, SHARE) * _lift(HALF)
    value_place = _turned((value_place[None, :] + inside * 0.0)[:, :, None], VALUE, TILE).to(DTYPE)
    while first < last:
        end = tl.minimum(tl.load(cu_pages + head + 1), last)
        operand, by_row, summed = _operand(query, channels, head, rows, row, scale, KEY, PART, D, HALF)
        by_place = key_place[:, None] * by_row[None, :]
        of_mask = mask + (head // kv_heads).to(tl.int64) * mask_b + (head % kv_heads).to(tl.int64) * mask_h
        highest = tl.full([4, N], float("-inf"), tl.float32)
        acc, sums = tl.zeros([4, DV, N], tl.float32), tl.zeros([4, 16, N], tl.float32)
        for page in tl.range(first, end, num_stages=STAGES):
            index = tl.load(table + page)
            stored = tl.load(count + index)
            at = tl.load(meta + index).to(tl.int64)
            index = index.to(tl.int64)
            if KEY[6] == KEY[7]:
                key_word = tl.load(key_codes + index * KEY_WORDS + key_words)
            else:
                key_word = tl.load(key_codes + index * KEY_WORDS + key_words, mask=there, other=0)
            value_word = tl.load(value_codes + index * VALUE_WORDS + value_words)
            number = _key_numbers(key_word, KEY, TILE, SHARE, HALF)
            logits = _logits(
                number, operand, (by_place, by_row), summed, key_scale, key_zero, at, inside, KEY, PAGE, SHARE, HALF
            )
            column = inside
            if MASKED or ADDED:
                column += tl.load(columns + page)
            if ADDED:
                of_row = added + (head.to(tl.int64) * rows + row) * added_step
                known = (inside < stored)[:, :, None] & (row < rows)[None, None, :]
                logits += tl.load(of_row[None, None, :] + column[:, :, None], mask=known, other=0.0) * scale
            seen = _seen(of_mask, mask_q, column, inside < stored, row, queries, MASKED, SINGLE)
            logits = tl.where(seen, logits, float("-inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            # a row that has seen nothing yet
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(logits - base[:, None, :]).to(DTYPE)
            shrink = tl.exp2(highest - base)[:, None, :]
            highest = higher
            number = _value_numbers(value_word, VALUE, TILE, SHARE, HALF)
            acc, sums = _with_values(
                number, _turned(p, VALUE, TILE), value_place, acc * shrink, sums * shrink, value_scale, value_zero, at,
                inside_values, VALUE, PAGE, SHARE, HALF,
            )  # fmt: skip
        _leave((highest, acc, sums), part, part_lse, program + head, rows, row, HALF, DV, VALUE)
        first = end
        head += 1
