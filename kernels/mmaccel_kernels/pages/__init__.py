"""Keys and values in few bits: the layout of packed pages, and its plain definition. This page is the specification.

**A page** holds ``page`` consecutive stored tokens of one KV head, or its first ``count`` ones; the rest is padding.
Its tokens come in **tiles** of ``tile`` tokens, tile ``s`` being tokens ``s tile`` to ``(s + 1) tile - 1``. Tokens are never
permuted: tile ``s`` of the keys and tile ``s`` of the values are the same tokens whatever the bits of either.

**Codes** are bytes ``[N, rows, D]``. A byte has room for ``digits`` codes of one channel (8, 5, 4, 2 or 1), which belong to as
many tiles: tiles ``b digits`` to ``(b + 1) digits - 1`` share the rows ``b tile`` to ``(b + 1) tile - 1``. So the code of
token ``t`` and channel ``d`` is digit ``(t // tile) % digits`` of byte ``[t // tile // digits * tile + t % tile, d]``: taking
digit ``i`` of a ``[tile, D]`` block of bytes gives a whole tile, a dense operand without shuffling anything. ``page`` should be
a multiple of ``tile digits`` for keys and values alike; what is missing to the next multiple is wasted. Where groups of 32
channels or a multiple of it have scales of their own (``axis="token"``), the channels of a row stand as
``[8, groups, group / 8]``: an eighth of every group, then the next eighth.

========= ====== ====== ===================================== ================================
code      levels digits digit i of byte w                     represents
========= ====== ====== ===================================== ================================
sign      2      8      ``w >> i & 1``                        ``scale (c - 1/2)``
ternary   3      5      ``(w 3^i mod 256) 3 >> 8``            ``scale (c - 1)``
three     3      4      ``w >> 2i & 3``                       ``scale (c - 1)``
int1      2      8      ``w >> i & 1``                        ``scale c + zero``
int2      4      4      ``w >> 2i & 3``                       ``scale c + zero``
int3      8      8      see below                             ``scale c + zero``
int4      16     2      ``w >> 4i & 15``                      ``scale c + zero``
int8      256    1      ``w``                                 ``scale c + zero``
fp8       253    1      ``w``, e4m3 (``scale`` is to 448)     ``scale e4m3(w)``
book1     2      8      ``w >> i & 1``                        ``scale level(c)``
book2     4      4      ``w >> 2i & 3``                       ``scale level(c)``
book3     8      8      see below                             ``scale level(c)``
book4     16     2      ``w >> 4i & 15``                      ``scale level(c)``
========= ====== ====== ===================================== ================================

Five ternary codes are the fraction ``w / 256`` in base 3, rounded up: digit ``i`` is the ``i``-th behind the point.
The levels of ``three`` are the same in a quarter more bytes, which an AND takes apart. An e4m3 byte is ``256`` times the
float16 with bits ``(w & 128) << 8 | (w & 127) << 7``, subnormal numbers included; no byte is NaN.
Codes of three bits have their lower two as those of two bits have them, and behind all these rows the highest ones as those
of one bit. ``level(c)`` of a ``book`` code of ``b`` bits is number ``c mod 2^(b - 1)`` of the positive levels of its format,
with a minus if ``c`` has its highest bit.

**Scales** (and ``zero`` where the code has one) stand in rows ``meta[n]`` of page ``n``: pages may share a row. Grouped
along tokens (``axis="channel"``: every channel has its own range) a row is ``[page / group, D]``, grouped along channels
(``axis="token"``: every token has its own) it is ``[page, D / group]``. A tile never crosses a group of tokens.

With ``axis="channel"`` nothing needs to be expanded: ``q . k_t = (q * scale) . c_t + q . zero`` and
``sum_t p_t v_t = scale * sum_t p_t c_t + zero sum_t p_t`` within a group.

**Heads** are ragged: head ``h`` of ``B Hkv`` (rows of the batch outermost) has pages ``table[cu_pages[h]:cu_pages[h + 1]]``,
in the order of its tokens. Pages are never changed once written; appending adds pages and makes a new table. Places whose
tokens were dropped stay until others can take them: see :meth:`Pages.compacted`.

**Waves.** A format with ``fourier`` codes not the channels of a token but their Fourier transform (:func:`waves`), which is
orthogonal, so that nothing is undone to attend: ``q . k = waves(q) . waves(k)`` (:meth:`Pages.turned`). One with a
``seed`` codes a rotation of the channels, ``R k``: keys are not rotated back either, and values once a query, when they are
summed.

**Factors.** A plane may have a ``factor`` for every channel of a head, which multiplies what codes represent: queries are
multiplied by those of keys before they are read, and what is summed of values by theirs.

**Remainders.** What codes lack may stand beside them, in the rows of the scales: a product of two thin matrices, and single
numbers with their places (:class:`Remainder`). Both are added to what codes represent; the kernel in Triton does so tile by
tile.

**Planes.** Keys (or values) may be split over channels into planes of different codes. A plane says which channels it
holds in ``channels [B Hkv, D']``; None says all, in order. What several planes hold of all channels is summed.

Tokens that are not packed, a full-precision residual, are no part of this: they are flat ``[total, D]`` with lengths, or dense.
"""

from __future__ import annotations

from .format import FP8_MAX, Code, Format, paged, tile_for
from .naive import channels_of, dequantise, from_book, from_e4m3, grouped, pack, turned, turned_back, unpack, waves
from .ragged import concatenated, cumulative, ranges, split, sums
from .rotation import matrix, rotate, rotate_back
from .storage import Pages, Plane, Remainder

__all__ = [
    "Code",
    "FP8_MAX",
    "Format",
    "Pages",
    "Plane",
    "Remainder",
    "channels_of",
    "concatenated",
    "cumulative",
    "dequantise",
    "from_book",
    "from_e4m3",
    "grouped",
    "matrix",
    "pack",
    "paged",
    "ranges",
    "rotate",
    "rotate_back",
    "split",
    "sums",
    "tile_for",
    "turned",
    "turned_back",
    "unpack",
    "waves",
]
