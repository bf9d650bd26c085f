"""Keys and values in few bits: the layout of packed pages, and its plain definition. This page is the specification.

**A page** holds ``page`` consecutive stored tokens of one KV head, or its first ``count`` ones; the rest is padding.
Its tokens come in **tiles** of ``tile`` tokens, tile ``s`` being tokens ``s tile`` to ``(s + 1) tile - 1``. Tokens are never
permuted: tile ``s`` of the keys and tile ``s`` of the values are the same tokens whatever the bits of either.

**Codes** are bytes ``[N, rows, D]``. A byte has room for ``digits`` codes of one channel (8, 5, 4, 2 or 1), which belong to as
many tiles: tiles ``b digits`` to ``(b + 1) digits - 1`` share the rows ``b tile`` to ``(b + 1) tile - 1``. So the code of
token ``t`` and channel ``d`` is digit ``(t // tile) % digits`` of byte ``[t // tile // digits * tile + t % tile, d]``: taking
digit ``i`` of a ``[tile, D]`` block of bytes gives a whole tile, a dense operand without shuffling anything. ``page`` should be
a multiple of ``tile digits`` for keys and values alike; what is missing to the next multiple is wasted.

========= ====== ====== ===================================== ================================
code      levels digits digit i of byte w                     stands for
========= ====== ====== ===================================== ================================
sign      2      8      ``w >> i & 1``                        ``scale (c - 1/2)``
ternary   3      5      ``(w 3^i mod 256) 3 >> 8``            ``scale (c - 1)``
int1      2      8      ``w >> i & 1``                        ``scale c + zero``
int2      4      4      ``w >> 2i & 3``                       ``scale c + zero``
int4      16     2      ``w >> 4i & 15``                      ``scale c + zero``
int8      256    1      ``w``                                 ``scale c + zero``
fp8       253    1      ``w``, e4m3 (``scale`` is to 448)     ``scale e4m3(w)``
========= ====== ====== ===================================== ================================

Five ternary codes are the fraction ``w / 256`` in base 3, rounded up: digit ``i`` is the ``i``-th behind the point. An e4m3
byte is ``256`` times the float16 with bits ``(w & 128) << 8 | (w & 127) << 7``, subnormal numbers included; no byte is NaN.

**Scales** (and ``zero`` where the code has one) stand in rows ``meta[n]`` of page ``n``: pages may share a row. Grouped
along tokens (``axis="channel"``: every channel has its own range) a row is ``[page / group, D]``, grouped along channels
(``axis="token"``: every token has its own) it is ``[page, D / group]``. A tile never crosses a group of tokens.

With ``axis="channel"`` nothing needs to be expanded: ``q . k_t = (q * scale) . c_t + q . zero`` and
``sum_t p_t v_t = scale * sum_t p_t c_t + zero sum_t p_t`` within a group.

**Heads** are ragged: head ``h`` of ``B Hkv`` (rows of the batch outermost) has pages ``table[cu_pages[h]:cu_pages[h + 1]]``,
in the order of its tokens. Pages are never changed once written; appending adds pages and makes a new table. Places whose
tokens were dropped stay until others can take them: see :meth:`Pages.compacted`.

**Waves.** A format with ``fourier`` codes not the channels of a token but their Fourier transform (:func:`waves`), which is
orthogonal, so that nothing is undone to attend: ``q . k = waves(q) . waves(k)`` (:meth:`Pages.turned`).

**Planes.** Keys (or values) may be split over channels into planes of different codes. A plane says which channels it
holds in ``channels [B Hkv, D']``; None says all, in order.

Tokens that are not packed, a full-precision residual, are no part of this: they are flat ``[total, D]`` with lengths, or dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Code = Literal["sign", "ternary", "int1", "int2", "int4", "int8", "fp8"]

#: code -> (levels, codes a byte, what a code without zero point is centred on)
_CODES: dict[str, tuple[int, int, float]] = {
    "sign": (2, 8, 0.5),
    "ternary": (3, 5, 1.0),
    "int1": (2, 8, 0.0),
    "int2": (4, 4, 0.0),
    "int4": (16, 2, 0.0),
    "int8": (256, 1, 0.0),
    "fp8": (253, 1, 0.0),
}

#: the largest number of e4m3
FP8_MAX = 448.0


@dataclass(frozen=True)
class Format:
    """How numbers become codes.

    Parameters
    ----------
    code : see the table above.
    axis : ``channel`` (one scale for every channel of a group of tokens) or ``token`` (one for every token of a group of
        channels).
    group : tokens, or channels, that share a scale.
    fourier : code the :func:`waves` of the channels.
    """

    code: Code
    axis: Literal["channel", "token"]
    group: int
    fourier: bool = False

    def __post_init__(self) -> None:
        if self.code not in _CODES:
            raise ValueError(f"There is no code {self.code!r}; there are {', '.join(_CODES)}.")
        if self.axis not in ("channel", "token"):
            raise ValueError(f"axis must be 'channel' or 'token', not {self.axis!r}.")
        if self.group < 1:
            raise ValueError(f"group must be at least 1, not {self.group}.")

    @property
    def levels(self) -> int:
        """Different codes."""
        return _CODES[self.code][0]

    @property
    def digits(self) -> int:
        """Codes a byte."""
        return _CODES[self.code][1]

    @property
    def centre(self) -> float:
        """The code that stands for nought, where there is no zero point."""
        return _CODES[self.code][2]

    @property
    def affine(self) -> bool:
        """Whether a zero point is stored."""
        return self.code.startswith("int")

    def rows(self, page: int, tile: int) -> int:
        """Rows of bytes of a page."""
        return tile * -(-page // (tile * self.digits))

    def meta(self, page: int, width: int) -> tuple[int, int]:
        """Shape of the scales of a page of ``width`` channels."""
        return (page // self.group, width) if self.axis == "channel" else (page, width // self.group)

    def check(self, page: int, tile: int, width: int) -> None:
        """Refuse a page that this format does not fit.

        Raises
        ------
        ValueError
            If the page is no whole number of tiles, a tile crosses a group, or groups do not fill page or channels.
        """
        if tile < 1 or page < 1 or page % tile:
            raise ValueError(f"A page of {page} tokens is no whole number of tiles of {tile}.")
        if self.axis == "channel" and (page % self.group or self.group % tile):
            raise ValueError(
                f"Groups of {self.group} tokens do not fit pages of {page} in tiles of {tile}: a page must be a whole "
                "number of groups and a group a whole number of tiles."
            )
        if self.axis == "token" and width % self.group:
            raise ValueError(f"{width} channels are no whole number of groups of {self.group}.")


@dataclass(frozen=True)
class Plane:
    """Keys or values of ``N`` pages in one code.

    codes : ``[N, rows, D']`` uint8, contiguous.
    scale, zero : ``[M, *format.meta]`` float16, bfloat16 or float32; ``zero`` None unless the format is affine.
    channels : ``[B Hkv, D']`` int32, the channels held, ascending; None for all.
    """

    format: Format
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    channels: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        yield from (t for t in (self.codes, self.scale, self.zero, self.channels) if t is not None)

    def decoded(self, page: int, tile: int, pages: Tensor, meta: Tensor) -> Tensor:
        """``[n, page, D']`` float32 of ``pages [n]`` with scales in rows ``meta [n]``."""
        codes = unpack(self.codes[pages], self.format, page, tile)
        zero = None if self.zero is None else self.zero[meta]
        return dequantise(codes, self.format, self.scale[meta], zero)

    def joined(self, other: Plane) -> Plane:
        """Both, one behind the other."""
        zero = None if self.zero is None or other.zero is None else torch.cat([self.zero, other.zero])
        codes, scale = torch.cat([self.codes, other.codes]), torch.cat([self.scale, other.scale])
        return replace(self, codes=codes, scale=scale, zero=zero)


@dataclass(frozen=True)
class Pages:
    """Packed keys and values of all heads of a layer.

    keys, values : planes; together they hold every channel once. Channels of keys that none holds are zero.
    page, tile : tokens.
    count : ``[N]`` int32, tokens in each page, from 1 to ``page``.
    meta : ``[N]`` int32, the row of scales of each page.
    table : ``[T]`` int32, pages by head; ``cu_pages [B Hkv + 1]`` int32, where each head begins.
    heads : Hkv.
    key_width : D, where planes of keys do not hold every channel; 0 where they do.
    tokens : of all heads together, where that is known without asking the device.
    """

    keys: tuple[Plane, ...]
    values: tuple[Plane, ...]
    page: int
    tile: int
    count: Tensor
    meta: Tensor
    table: Tensor
    cu_pages: Tensor
    heads: int
    key_width: int = 0
    tokens: int | None = None

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return (len(self.cu_pages) - 1) // self.heads

    def lengths(self) -> Tensor:
        """Tokens of every head, ``[B, Hkv]`` long."""
        return sums(self.count[self.table].long(), self.cu_pages).view(-1, self.heads)

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        for plane in (*self.keys, *self.values):
            yield from plane.tensors()
        yield from (self.count, self.meta, self.table, self.cu_pages)

    def nbytes(self) -> int:
        """Bytes held: codes, scales, tables."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors()}
        return sum(storages.values())

    def turned(self, query: Tensor) -> Tensor:
        """``query [B, Hq, q, D]`` as the keys are coded: the same, but for waves where a plane of keys holds them."""
        for plane in self.keys:
            if plane.format.fourier:
                rows = query.reshape(self.batch * self.heads, -1, query.shape[-1])
                if plane.channels is None:
                    query = waves(rows).to(query.dtype).view_as(query)
                else:
                    at = plane.channels.long()[:, None].expand(-1, rows.shape[1], -1)
                    query = rows.scatter(2, at, waves(rows.gather(2, at)).to(query.dtype)).view_as(query)
        return query

    def decoded(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Keys and values, flat ``[total, D]`` each: head after head, tokens in order (lengths as :meth:`lengths`)."""
        return self._decoded(self.keys, dtype, self.key_width), self._decoded(self.values, dtype)

    def _decoded(self, planes: tuple[Plane, ...], dtype: torch.dtype, width: int = 0) -> Tensor:
        table = self.table.long()
        there = torch.arange(self.page, device=table.device) < self.count[table][:, None]
        parts = [plane.decoded(self.page, self.tile, table, self.meta[table].long()) for plane in planes]
        tokens = int(there.sum()) if self.tokens is None else self.tokens
        parts = [part.flatten(0, 1) for part in parts]
        if tokens < there.numel():
            filled = (~there).flatten().long().argsort(stable=True)[:tokens]
            parts = [part[filled] for part in parts]
        if len(parts) == 1 and planes[0].channels is None:
            return parts[0].to(dtype)
        out = parts[0].new_zeros(len(parts[0]), width or sum(part.shape[1] for part in parts))
        per_head = self.lengths().flatten()
        for part, plane in zip(parts, planes, strict=True):
            assert plane.channels is not None
            head = torch.repeat_interleave(per_head, output_size=tokens)
            out.scatter_(1, plane.channels.long()[head], part)
        return out.to(dtype)

    def appended(self, other: Pages) -> Pages:
        """The tokens of ``other`` behind those of the same head here. What is written already is not touched.

        Raises
        ------
        ValueError
            If formats or heads differ.
        """
        mine, theirs = (self.keys, self.values), (other.keys, other.values)
        same = [[plane.format for plane in planes] for planes in (*mine, *theirs)]
        shape = [(pages.page, pages.tile, pages.heads, pages.key_width) for pages in (self, other)]
        if same[:2] != same[2:] or shape[0] != shape[1]:
            raise ValueError("Pages of different formats cannot be joined.")
        if len(self.cu_pages) != len(other.cu_pages):
            raise ValueError(f"{len(other.cu_pages) - 1} heads cannot be appended to {len(self.cu_pages) - 1}.")
        first, second = self.cu_pages.diff().long(), other.cu_pages.diff().long()
        owner = torch.cat(
            [torch.repeat_interleave(n, output_size=len(pages.table)) for n, pages in ((first, self), (second, other))]
        )
        tables = torch.cat([self.table, other.table + len(self.count)])
        cu_pages = self.cu_pages + other.cu_pages
        joined = [tuple(a.joined(b) for a, b in zip(*planes, strict=True)) for planes in zip(mine, theirs, strict=True)]
        return replace(
            self,
            keys=joined[0],
            values=joined[1],
            count=torch.cat([self.count, other.count]),
            meta=torch.cat([self.meta, other.meta + len(self.keys[0].scale)]),
            table=tables[owner.argsort(stable=True)],
            cu_pages=cu_pages,
            tokens=None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
        )

    def selected(self, rows: Tensor) -> Pages:
        """Rows of the batch kept, repeated or reordered; repeated rows share their pages, pages of no row are freed."""
        cu = self.cu_pages.long()
        per_head = cu.diff().view(-1, self.heads)[rows].flatten()
        start = cu[:-1].view(-1, self.heads)[rows].flatten()
        table = self.table[ranges(start, per_head)].long()
        pages, table = table.unique(return_inverse=True)
        meta_rows, meta = self.meta[pages].long().unique(return_inverse=True)
        heads = (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).flatten()

        def pick(plane: Plane) -> Plane:
            return replace(
                plane,
                codes=plane.codes[pages],
                scale=plane.scale[meta_rows],
                zero=None if plane.zero is None else plane.zero[meta_rows],
                channels=None if plane.channels is None else plane.channels[heads],
            )

        return replace(
            self,
            keys=tuple(map(pick, self.keys)),
            values=tuple(map(pick, self.values)),
            count=self.count[pages],
            meta=meta.int(),
            table=table.int(),
            cu_pages=cumulative(per_head),
            tokens=None,
        )

    def cropped(self, lengths: Tensor) -> Pages:
        """Only the first ``lengths [B, Hkv]`` tokens of every head; nothing is quantised again. Rows that share pages must be
        cut alike."""
        table, head = self.table.long(), torch.repeat_interleave(self.cu_pages.diff().long())
        count = self.count[table].long()
        before = count.cumsum(0) - count
        left = lengths.flatten()[head] - (before - before[self.cu_pages.long()[head]])
        stays = left > 0
        counts = self.count.clone()
        counts[table[stays]] = torch.minimum(left, count)[stays].int()
        cu_pages = cumulative(sums(stays.long(), self.cu_pages))
        cut = replace(self, count=counts, table=self.table[stays], cu_pages=cu_pages)
        return cut.selected(torch.arange(self.batch, device=table.device))

    @property
    def pooled(self) -> bool:
        """Whether a page has one row of scales for all its tokens, so that it can hold any tokens of that row."""
        formats = [plane.format for plane in (*self.keys, *self.values)]
        return all(format.axis == "channel" and format.group == self.page for format in formats)

    @property
    def unit(self) -> int:
        """Tokens that share scales, and whose places become free together; 1 where every token can move by itself."""
        formats = [plane.format for plane in (*self.keys, *self.values)]
        return 1 if self.pooled else math.lcm(*(format.group for format in formats if format.axis == "channel"))

    def compacted(self, live: Tensor) -> tuple[Pages, Tensor] | None:
        """Fewer pages, with the same codes and scales: nothing is quantised again.

        A code means nothing without its scale, so the tokens of a :attr:`unit` stay together: what is dropped of it leaves
        dead places, and a unit without a living token is left out.

        Parameters
        ----------
        live : ``[B Hkv, L]`` bool, the places of every head whose tokens are needed; ``L`` is the longest of
            :meth:`lengths`.

        Returns
        -------
        New pages, which no two rows share, and ``[B Hkv, L']`` long: which place each of theirs was, -1 for none (which of
        them are alive is for the caller to know). None if less than an eighth of the pages would be saved: writing them
        anew costs as much as reading all of them.
        """
        unit, each, table = self.unit, self.page // self.unit, self.table.long()
        head, place, alive = self._listed(live)
        alive = alive.unflatten(1, (each, unit)).any(2)
        # pages between which units may move: those of a head, or of a head and a row of scales
        rows, row = self.meta[table].unique(return_inverse=True)
        _, run = (head * len(rows) + row if self.pooled else head).unique_consecutive(return_inverse=True)
        owner = run.new_zeros(int(run[-1]) + 1 if len(run) else 0).scatter_(0, run, head)
        units = torch.zeros_like(owner).scatter_add_(0, run, alive.sum(1))
        pages = -(-units // each)
        if 8 * int(pages.sum()) > 7 * len(self.count):
            return None
        source, slot = alive.nonzero(as_tuple=True)
        rank = torch.arange(len(source), device=table.device) - (units.cumsum(0) - units)[run[source]]
        at = (pages.cumsum(0) - pages)[run[source]] + rank // each, rank % each
        of = torch.repeat_interleave(pages)
        number = torch.arange(len(of), device=table.device)

        def moved(x: Tensor, fill: int = 0) -> Tensor:
            """``[T, n each, ...]`` of the listed pages -> the same of the new ones."""
            parts = x.unflatten(1, (each, -1))
            out = parts.new_full((len(of), *parts.shape[1:]), fill)
            out[at] = parts[source, slot]
            return out.flatten(1, 2)

        def rewritten(plane: Plane) -> Plane:
            codes = pack(moved(unpack(plane.codes[table], plane.format, self.page, self.tile)), plane.format, self.tile)
            scales = [
                None if x is None else x[rows] if self.pooled else moved(x[self.meta[table].long()])
                for x in (plane.scale, plane.zero)
            ]
            assert scales[0] is not None
            return replace(plane, codes=codes, scale=scales[0], zero=scales[1])

        last = units[of] - (number - (pages.cumsum(0) - pages)[of]) * each
        made = replace(
            self,
            keys=tuple(map(rewritten, self.keys)),
            values=tuple(map(rewritten, self.values)),
            count=(last.clamp(max=each) * unit).int(),
            meta=(number.new_zeros(len(of)).scatter_(0, at[0], row[source]) if self.pooled else number).int(),
            table=number.int(),
            cu_pages=cumulative(torch.zeros_like(self.cu_pages[1:]).long().scatter_add_(0, owner, pages)),
            tokens=None,
        )
        was, lengths = moved(place, -1), made.lengths().flatten()
        slots = torch.arange(int(lengths.max()), device=table.device) < lengths[:, None]
        found = was.new_full(slots.shape, -1)
        found[slots] = was[torch.arange(self.page, device=table.device) < made.count[:, None]]
        return made, found

    def sparse(self, live: Tensor, token: int) -> Tensor:
        """Which of the ``live [B Hkv, L]`` places belong to scales that serve so few that they would take less memory in full
        precision, ``token`` bytes each."""
        group = self.page if self.pooled else self.unit
        size = sum(plane.codes[:1].nbytes for plane in (*self.keys, *self.values))
        if not self.pooled:
            size += sum(x[:1].nbytes for p in (*self.keys, *self.values) for x in (p.scale, p.zero) if x is not None)
        head, place, alive = self._listed(live)
        few = alive.unflatten(1, (-1, group)).sum(2) * token * self.page < size * group
        few = alive & few.repeat_interleave(group, dim=1)
        out = torch.zeros_like(live)
        out[head[:, None].expand_as(place)[few], place[few]] = True
        return out

    def _listed(self, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every listed page its head ``[T]`` long, and of its tokens the places in that head ``[T, page]`` long (-1: none)
        and whether they are ``live [B Hkv, L]``."""
        head, count = torch.repeat_interleave(self.cu_pages.diff().long()), self.count[self.table.long()].long()
        token, before = torch.arange(self.page, device=count.device), count.cumsum(0) - count
        place = (before - before[self.cu_pages.long()[head]])[:, None] + token
        place = place.masked_fill(token >= count[:, None], -1)
        return head, place, live[head[:, None], place.clamp(min=0)] & (place >= 0)


# --- codes ------------------------------------------------------------------------------------------------------------
def pack(codes: Tensor, format: Format, tile: int) -> Tensor:
    """``codes [N, page, D]``, whole numbers below ``levels`` (e4m3 bytes for fp8) -> bytes ``[N, rows, D]`` uint8."""
    digits, rows, (n, page, width) = format.digits, format.rows(codes.shape[1], tile), codes.shape
    padded = codes.new_zeros(n, rows * digits, width, dtype=torch.int32)
    padded[:, :page] = codes
    padded = padded.view(n, rows // tile, digits, tile, width)
    weights = [3 ** (4 - i) if format.code == "ternary" else format.levels**i for i in range(digits)]
    if digits == 1:
        weights = [1]
    number = sum(padded[:, :, i] * weight for i, weight in enumerate(weights))
    assert isinstance(number, Tensor)
    if format.code == "ternary":
        number = (number * 256 + 242) // 243
    return number.to(torch.uint8).view(n, rows, width)


def unpack(packed: Tensor, format: Format, page: int, tile: int) -> Tensor:
    """The inverse of :func:`pack`: bytes ``[N, rows, D]`` -> codes ``[N, page, D]`` int32."""
    n, rows, width = packed.shape
    # no size is left to be inferred: there may be no page
    blocks = packed.int().view(n, rows // tile, 1, tile, width)
    if format.digits == 1:
        return blocks.view(n, rows, width)[:, :page]
    if format.code == "ternary":
        power = torch.tensor([3**i for i in range(5)], dtype=torch.int32, device=packed.device)
        codes = (blocks * power[:, None, None] & 255) * 3 >> 8
    else:
        shift = torch.arange(format.digits, dtype=torch.int32, device=packed.device) * (8 // format.digits)
        codes = blocks >> shift[:, None, None] & (format.levels - 1)
    return codes.reshape(n, rows * format.digits, width)[:, :page]


def dequantise(codes: Tensor, format: Format, scale: Tensor, zero: Tensor | None) -> Tensor:
    """``codes [N, page, D]`` and scales ``[N, *format.meta]`` -> ``[N, page, D]`` float32."""
    n, page, width = codes.shape
    value = from_e4m3(codes) if format.code == "fp8" else codes.float() - format.centre
    value = grouped(value, format) * _spread(scale.float(), format)
    if zero is not None:
        value = value + _spread(zero.float(), format)
    value = value.reshape(n, page, width)
    return channels_of(value) if format.fourier else value


def grouped(x: Tensor, format: Format) -> Tensor:
    """``[N, page, D]`` as ``[N, groups, group, D]`` or ``[N, page, groups, group]``."""
    return x.unflatten(1 if format.axis == "channel" else 2, (-1, format.group))


def _spread(meta: Tensor, format: Format) -> Tensor:
    return meta.unsqueeze(2 if format.axis == "channel" else 3)


def waves(x: Tensor) -> Tensor:
    """The orthonormal Fourier transform of the last axis, in real numbers: ``[..., D]`` -> ``[..., D]`` float32.

    The transform of real numbers at frequency ``D - f`` is the conjugate of that at ``f``, so half of it says all: first the
    real parts at frequencies 0 to ``D // 2``, then the imaginary parts at 1 to ``(D - 1) // 2``.
    """
    width = x.shape[-1]
    spectrum = torch.view_as_real(torch.fft.rfft(x.float(), norm="ortho"))
    # what stands for two frequencies weighs twice as much
    twice = 0.5**-0.5
    real = spectrum[..., 0] * torch.where(_paired(width, x.device), twice, 1.0)
    return torch.cat([real, spectrum[..., 1 : (width + 1) // 2, 1] * twice], dim=-1)


def channels_of(x: Tensor) -> Tensor:
    """The inverse of :func:`waves`."""
    width, half = x.shape[-1], x.shape[-1] // 2 + 1
    real = x[..., :half] * torch.where(_paired(width, x.device), 0.5**0.5, 1.0)
    imaginary = torch.zeros_like(real)
    imaginary[..., 1 : (width + 1) // 2] = x[..., half:] * 0.5**0.5
    return torch.fft.irfft(torch.complex(real, imaginary), n=width, norm="ortho")


def _paired(width: int, device: torch.device) -> Tensor:
    """Which of the frequencies 0 to ``width // 2`` have another that is their conjugate, bool."""
    frequency = torch.arange(width // 2 + 1, device=device)
    return (frequency > 0) & (2 * frequency < width)


def from_e4m3(byte: Tensor) -> Tensor:
    """Bytes of e4m3 numbers -> float32, by whole-number operations: not every device knows the type."""
    half = ((byte & 128) << 8 | (byte & 127) << 7).to(torch.int32)
    # to the signed range of int16, whose bits are then read as float16
    return (half - (half >> 15 << 16)).to(torch.int16).view(torch.float16).float() * 256


# --- ragged heads -----------------------------------------------------------------------------------------------------
def cumulative(lengths: Tensor) -> Tensor:
    """``[n]`` -> ``[n + 1]`` int32: where each begins, and the sum."""
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0)).int()


def ranges(start: Tensor, length: Tensor) -> Tensor:
    """``start[i], start[i] + 1, ...``, ``length[i]`` of them, one after the other; ``[sum(length)]`` long."""
    begin = length.cumsum(0) - length
    offset = torch.repeat_interleave(start - begin, length)
    return torch.arange(len(offset), device=start.device) + offset


def sums(values: Tensor, bounds: Tensor) -> Tensor:
    """Sums of ``values`` between consecutive ``bounds``, ``[len(bounds) - 1]``."""
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))[bounds.long()].diff()


def split(lengths: Tensor, page: int, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Flat ragged heads cut into pages.

    Parameters
    ----------
    lengths : ``[B Hkv]`` long, tokens of each head, which stand one head after the other in a flat ``[total, D]``.
    total : how many pages that makes, where it is known without asking the device.

    Returns
    -------
    first row and count of every page, ``[N]`` long and int32, head after head; ``cu_pages [B Hkv + 1]`` int32.
    """
    lengths = lengths.long()
    pages = -(-lengths // page)
    cu_pages = cumulative(pages)
    head = torch.repeat_interleave(pages, output_size=total)
    offset = (torch.arange(len(head), device=head.device) - cu_pages.long()[head]) * page
    start = (lengths.cumsum(0) - lengths)[head] + offset
    return start, (lengths[head] - offset).clamp(max=page).int(), cu_pages


def concatenated(parts: Sequence[Tensor], lengths: Sequence[Tensor]) -> Tensor:
    """Flat ragged parts ``[total_i, D]`` with ``lengths_i [heads]`` -> flat, the parts of each head one after the other."""
    owner = torch.cat([torch.repeat_interleave(n.flatten()) for n in lengths])
    return torch.cat(list(parts))[owner.argsort(stable=True)]
