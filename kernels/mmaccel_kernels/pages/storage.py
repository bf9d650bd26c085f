"""Pages of a layer as they are stored: joined, selected, cut and compacted without quantising anything again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .format import Format
from .naive import dequantise, pack, turned, turned_back, unpack
from .ragged import cumulative, ranges, sums


@dataclass(frozen=True)
class Remainder:
    """Correction of the codes of pages, in the rows of their scales: a product of two factors, and single numbers. Where
    channels are rotated before they are coded, it is one of rotated channels.

    left, right : ``[M, page, r]`` and ``[M, r, D']``, whose product is added to what codes represent; None for none.
    value, place : ``[M, n]`` numbers that are added, and ``[M, n]`` int16 or int32, where: at ``token D' + channel``; None for
        none. Every channel has as many, one channel after the other, where scales are by channel, and else every token.
    """

    left: Tensor | None = None
    right: Tensor | None = None
    value: Tensor | None = None
    place: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """All tensors, or None where there are none."""
        return self.left, self.right, self.value, self.place

    def added_to(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Add the remainder in ``rows [n]``, all if these are None, to what codes represent, ``x [n, page, D']`` float32."""
        left, right, value, place = (p if p is None or rows is None else p.index_select(0, rows) for p in self.parts)
        if left is not None and right is not None:
            x = x + left.float() @ right.float()
        if value is not None and place is not None:
            x = x.flatten(1).scatter_add(1, place.long(), value.float()).view_as(x)
        return x


@dataclass(frozen=True)
class Plane:
    """Keys or values of ``N`` pages in one code.

    codes : ``[N, rows, D']`` uint8, contiguous.
    scale, zero : ``[M, *format.meta]`` float16, bfloat16 or float32; ``zero`` None unless the format is affine.
    channels : ``[B Hkv, D']`` int32, the channels held, ascending; None for all.
    factor : ``[B Hkv, D']``, by head what every channel is multiplied by that is represented; None for none.
    rest : what codes lack of the numbers; None for nothing.
    """

    format: Format
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    channels: Tensor | None = None
    factor: Tensor | None = None
    rest: Remainder | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        own = self.codes, *self.of_rows(), self.channels, self.factor
        yield from (t for t in own if t is not None)

    def of_rows(self) -> Iterator[Tensor]:
        """Everything that pages find by :attr:`Pages.meta`: scales, zero points, and the remainder."""
        own = self.scale, self.zero, *(() if self.rest is None else self.rest.parts)
        yield from (t for t in own if t is not None)

    def with_rows(self, change: Callable[[Tensor], Tensor], codes: Tensor) -> Plane:
        """The same with other ``codes``, and everything of :meth:`of_rows` as ``change`` returns it."""
        scale, zero, rest = change(self.scale), None if self.zero is None else change(self.zero), self.rest
        if rest is not None:
            rest = Remainder(*(None if part is None else change(part) for part in rest.parts))
        return replace(self, codes=codes, scale=scale, zero=zero, rest=rest)

    def decoded(
        self, page: int, tile: int, pages: Tensor | None, meta: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """``[n, page, D']`` float32 of ``pages [n]`` with scales in rows ``meta [n]``, of all in their order if these are None;
        written to ``out [..., page, D']`` if it is given."""
        codes = unpack(self.codes if pages is None else self.codes.index_select(0, pages), self.format, page, tile)
        scale, zero = (x if x is None or meta is None else x.index_select(0, meta) for x in (self.scale, self.zero))
        assert scale is not None
        if out is not None:
            shape = out.shape[:-2]
            codes, scale = codes.view(out.shape), scale.view(*shape, *scale.shape[1:])
            zero = None if zero is None else zero.view(*shape, *zero.shape[1:])
        if self.rest is None:
            return dequantise(codes, self.format, scale, zero, out)
        coded = dequantise(codes, replace(self.format, seed=None, fourier=False), scale, zero)
        return turned_back(self.rest.added_to(coded, meta), self.format)

    def joined(self, other: Plane) -> Plane:
        """Both, one behind the other; channels and factors are those of ``other``, which may differ where nothing is stored
        here."""
        theirs = other.of_rows()
        joined = self.with_rows(lambda x: torch.cat([x, next(theirs)]), torch.cat([self.codes, other.codes]))
        return replace(joined, channels=other.channels, factor=other.factor)


def rotated_apart(planes: tuple[Plane, ...]) -> bool:
    """Whether these are two planes of a part of the channels each, which are rotated and nothing else."""
    return len(planes) == 2 and all(
        of.channels is not None and of.format.seed is not None and not of.format.sketch and of.factor is None
        for of in planes
    )


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
        if self.even:
            return (self.cu_pages.diff().long() * self.page).view(-1, self.heads)
        return sums(self.count[self.table].long(), self.cu_pages).view(-1, self.heads)

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        for plane in (*self.keys, *self.values):
            yield from plane.tensors()
        yield from self.listing

    @property
    def listing(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tensors that locate tokens in pages: ``count``, ``meta``, ``table`` and ``cu_pages``."""
        return self.count, self.meta, self.table, self.cu_pages

    def listed(self, count: Tensor, meta: Tensor, table: Tensor, cu_pages: Tensor) -> Pages:
        """The same pages with another copy of their :attr:`listing`, such as one on the CPU, of which the host is told where
        tokens are without waiting."""
        return replace(self, count=count, meta=meta, table=table, cu_pages=cu_pages)

    def nbytes(self) -> int:
        """Bytes held: codes, scales, tables."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors()}
        return sum(storages.values())

    def turned(self, query: Tensor) -> Tensor:
        """``query [B, Hq, q, D]`` as the keys are coded: the same, but turned where a plane of keys holds turned ones, and
        multiplied by the factors of a plane of all channels."""
        for plane in self.keys:
            if plane.factor is not None:
                rows = query.reshape(self.batch * self.heads, -1, query.shape[-1])
                query = (rows * plane.factor[:, None]).to(query.dtype).view_as(query)
            if plane.format.turned:
                rows = query.reshape(self.batch * self.heads, -1, query.shape[-1])
                if plane.channels is None:
                    query = turned(rows, plane.format).to(query.dtype).view_as(query)
                else:
                    at = plane.channels.long()[:, None].expand(-1, rows.shape[1], -1)
                    query = rows.scatter(2, at, turned(rows.gather(2, at), plane.format).to(query.dtype)).view_as(query)
        return query

    @property
    def values_turned(self) -> bool:
        """Whether values are stored in one plane, and are rotated or have factors, or in two that are rotated apart."""
        first = self.values[0]
        if len(self.values) == 1:
            return first.format.seed is not None or first.factor is not None
        return rotated_apart(self.values)

    def with_values_as_stored(self) -> Pages:
        """The same pages, of whose values nothing is rotated back or multiplied by factors."""
        values = (replace(one, format=replace(one.format, seed=None), factor=None) for one in self.values)
        return replace(self, values=tuple(values))

    @staticmethod
    def width_of(planes: tuple[Plane, ...]) -> int:
        """Channels that planes hold; several planes of all channels are summed."""
        return planes[0].codes.shape[2] if planes[0].channels is None else sum(one.codes.shape[2] for one in planes)

    @cached_property
    def summed(self) -> bool:
        """Whether a side is a sum of several planes of all channels."""
        return any(len(side) > 1 and side[0].channels is None for side in (self.keys, self.values))

    @cached_property
    def remains(self) -> bool:
        """Whether codes have a remainder."""
        return any(plane.rest is not None for plane in (*self.keys, *self.values))

    def decoded(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Keys and values, flat ``[total, D]`` each: head after head, tokens in order (lengths as :meth:`lengths`)."""
        return self._decoded(self.keys, dtype, self.key_width), self._decoded(self.values, dtype)

    @cached_property
    def even(self) -> bool:
        """Whether all pages are full and listed once, every head has as many, and keys and values are one plane of codes each;
        asked of a CPU only, else False."""
        planes = (*self.keys, *self.values)
        apart = len(planes) > 2 or self.remains
        apart |= any(plane.channels is not None or plane.factor is not None for plane in planes)
        if self.table.device.type != "cpu" or apart or len(self.table) != len(self.count) or not len(self.table):
            return False
        same = self.cu_pages.diff() == len(self.table) // (self.batch * self.heads)
        return bool(same.all()) and bool((self.count == self.page).all())

    @cached_property
    def _in_order(self) -> bool:
        """Whether pages and the rows of their scales are listed as they are stored."""
        own = torch.arange(len(self.table), dtype=torch.int32)
        return torch.equal(self.table, own) and torch.equal(self.meta, own)

    def decoded_into(self, keys: Tensor, values: Tensor) -> None:
        """Write keys and values of pages that are :attr:`even` to ``[B, Hkv, T, D]`` each."""
        pages = None if self._in_order else self.table
        meta = None if pages is None else self.meta.index_select(0, pages)
        for (plane,), out in ((self.keys, keys), (self.values, values)):
            plane.decoded(self.page, self.tile, pages, meta, out.unflatten(2, (-1, self.page)))

    def _decoded(self, planes: tuple[Plane, ...], dtype: torch.dtype, width: int = 0) -> Tensor:
        # a table may have room behind its last head
        table = (self.table[: int(self.cu_pages[-1])] if self.tokens is None else self.table).long()
        there = torch.arange(self.page, device=table.device) < self.count[table][:, None]
        parts = [plane.decoded(self.page, self.tile, table, self.meta[table].long()) for plane in planes]
        tokens = int(there.sum()) if self.tokens is None else self.tokens
        parts = [part.flatten(0, 1) for part in parts]
        if tokens < there.numel():
            filled = (~there).flatten().long().argsort(stable=True)[:tokens]
            parts = [part[filled] for part in parts]
        if any(plane.factor is not None for plane in planes):
            head = torch.repeat_interleave(self.lengths().flatten(), output_size=tokens)
            parts = [
                part if plane.factor is None else part * plane.factor.float()[head]
                for part, plane in zip(parts, planes, strict=True)
            ]
        if planes[0].channels is None:
            return torch.stack(parts).sum(0).to(dtype) if len(parts) > 1 else parts[0].to(dtype)
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
                plane.with_rows(lambda x: x[meta_rows], plane.codes[pages]),
                channels=None if plane.channels is None else plane.channels[heads],
                factor=None if plane.factor is None else plane.factor[heads],
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

    def slots_in(self, whole: Pages, width: int) -> Tensor:
        """Places in every head of ``whole`` of the tokens of these pages, some of its own: ``[B, Hkv, width]`` long, 0
        behind the last one. Nothing is waited for."""

        def listed(pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
            """Head of every listed page, its first place there, and whether it is no room to spare."""
            entry = torch.arange(len(pages.table), device=pages.table.device, dtype=torch.int32)
            cu, counts = pages.cu_pages.long(), pages.count[pages.table.long()].long()
            head = (torch.searchsorted(pages.cu_pages, entry, right=True) - 1).clamp(max=len(cu) - 2)
            before = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            return head, before[:-1] - before[cu[head]], entry < cu[-1]

        heads, total = len(self.cu_pages) - 1, len(whole.count)
        _, first, real = listed(whole)
        at = torch.where(real, whole.table.long(), total)
        of_page = first.new_zeros(total + 1).scatter_(0, at, first)
        head, first, real = listed(self)
        token = torch.arange(self.page, device=first.device)
        there = (token < self.count[self.table.long()][:, None]) & real[:, None]
        onto = torch.where(there, (head * width + first)[:, None] + token, heads * width)
        places = of_page[self.table.long()][:, None] + token
        out = first.new_zeros(heads * width + 1).scatter_(0, onto.flatten(), places.flatten())
        return out[:-1].view(-1, self.heads, width)

    @property
    def pooled(self) -> bool:
        """Whether a page has one row of scales for all its tokens, so that it can hold any tokens of that row."""
        formats = [plane.format for plane in (*self.keys, *self.values)]
        return not self.remains and all(format.axis == "channel" and format.group == self.page for format in formats)

    @property
    def unit(self) -> int:
        """Tokens that share scales or a remainder, and whose places become free together; 1 where every token can move by
        itself."""
        if self.remains:
            return self.page
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
        New pages, which no two rows share, whose :attr:`listing` is on the device of this one, and ``[B Hkv, L']`` long: which
        place each of theirs was, -1 for none (which of them are alive is for the caller to know). None if less than an eighth
        of the pages would be saved: writing them anew costs as much as reading all of them.
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

        def sent(x: Tensor, device: torch.device) -> Tensor:
            return x.to(device, non_blocking=device.type != "cpu")

        def moved(x: Tensor, fill: int = 0) -> Tensor:
            """``[T, n each, ...]`` of the listed pages -> the same of the new ones."""
            parts = x.unflatten(1, (each, -1))
            out = parts.new_full((len(of) * each, *parts.shape[2:]), fill)
            onto, where = (sent(number * each + place, x.device) for number, place in (at, (source, slot)))
            return (
                out.index_copy_(0, onto, parts.flatten(0, 1).index_select(0, where))
                .unflatten(0, (len(of), each))
                .flatten(1, 2)
            )

        def rewritten(plane: Plane) -> Plane:
            listed, owned, scaled = (sent(x, plane.codes.device) for x in (table, rows, self.meta[table].long()))
            codes = unpack(plane.codes[listed], plane.format, self.page, self.tile)
            codes = pack(moved(codes), plane.format, self.tile)
            return plane.with_rows(lambda x: x[owned] if self.pooled else moved(x[scaled]), codes)

        last = units[of] - (number - (pages.cumsum(0) - pages)[of]) * each
        made = replace(
            self,
            keys=tuple(map(rewritten, self.keys)),
            values=tuple(map(rewritten, self.values)),
            count=(last.clamp(max=each) * unit).int(),
            meta=(number.new_zeros(len(of)).scatter_(0, at[0], row[source]) if self.pooled else number).int(),
            table=number.int(),
            cu_pages=cumulative(torch.zeros_like(self.cu_pages[1:]).long().scatter_add_(0, owner, pages)),
            tokens=int((last.clamp(max=each) * unit).sum()) if table.device.type == "cpu" else None,
        )
        was, lengths = moved(place, -1), made.lengths().flatten()
        slots = torch.arange(int(lengths.max()), device=table.device) < lengths[:, None]
        found = was.new_full(slots.shape, -1)
        found[slots] = was[torch.arange(self.page, device=table.device) < made.count[:, None]]
        return made, found

    def sparse(self, live: Tensor, token: int) -> Tensor:
        """Mask of the ``live [B Hkv, L]`` places that belong to scales that serve so few that full precision would take less
        memory, ``token`` bytes each."""
        group = self.page if self.pooled else self.unit
        size = sum(plane.codes[:1].nbytes for plane in (*self.keys, *self.values))
        if not self.pooled:
            size += sum(x[:1].nbytes for plane in (*self.keys, *self.values) for x in plane.of_rows())
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
