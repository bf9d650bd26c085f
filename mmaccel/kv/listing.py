"""Packed pages as units of a sparse read: which of them compete, and the table of those that a step reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from mmaccel_kernels.pages import Pages
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class PageSlots:
    """Places of the packed pages of every head among its slots.

    first : ``[B, heads, W]`` long, the first slot of the pages of a head, in their order; ``W`` for none.
    of : ``[B, heads, W]`` long, the page of every packed slot, by its number within the head; meaningless behind the last.
    """

    first: Tensor
    of: Tensor

    @staticmethod
    def make(pages: Pages, width: int, heads: int) -> PageSlots:
        """Listing of ``width`` packed slots; of the first head alone if ``heads`` is 1, since all are alike. Nothing waits."""
        cu, count = pages.cu_pages.long(), pages.count[pages.table.long()].long()
        head, number = _numbered(pages)
        before = count.cumsum(0) - count
        start = before - pad(before, (0, 1))[cu[head]]
        first = start.new_full((len(cu) - 1, width), width)
        first[head, number] = start
        begins = torch.zeros_like(first)
        begins[head, start] = 1
        shape = (pages.batch, pages.heads, width)
        return PageSlots(first.view(shape)[:, :heads], (begins.cumsum(1) - 1).view(shape)[:, :heads])

    def whole(self, rivals: Tensor, there: Tensor) -> Tensor:
        """``[B, heads, W]`` bool: the pages of which all keys that are ``there`` are ``rivals``, both ``[B, heads, W]`` bool by
        slot, and any is."""
        of = self.of.clamp(min=0)
        counts = (torch.zeros_like(of).scatter_add_(2, of, x.long()) for x in (rivals, there & ~rivals))
        won, lost = counts
        return (won > 0) & (lost == 0)


@dataclass(frozen=True, eq=False)
class Listing:
    """Names of the packed pages of one layer, by which a step lists in a table those that it reads: of every head
    first those that every step reads, then those that are picked.

    names : ``[B, Hkv, P + 1]`` int32, the pages that compete; the last is none.
    table : ``[T]`` int32, all pages.
    head, place : ``[T + B Hkv most]`` of these, and behind them of as many as may be picked: whose they are, where among the
        pages of their head; ``T`` for the place of those that compete.
    always : ``[B, Hkv]`` int32, pages that every step reads.
    fixed : the table but for what is picked, the places of that, and where heads begin, if every step picks as many.
    """

    names: Tensor
    table: Tensor
    head: Tensor
    place: Tensor
    always: Tensor
    fixed: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def make(pages: Pages, rivals: Tensor, most: int, count: Tensor | None) -> Listing:
        """Pages ``rivals [B, 1 or Hkv, P]`` long compete, by their numbers within heads, -1 for none; of these ``count [B, 1 or
        Hkv]``, at most ``most``, are read in every step, or as many as a step says. Nothing waits."""
        cu, total, shape = pages.cu_pages.long(), len(pages.table), (pages.batch, pages.heads)
        rivals, device = rivals.expand(*shape, -1), pages.table.device
        at = torch.where(rivals >= 0, cu[:-1].view(*shape, 1) + rivals, total)
        names = pad(pages.table, (0, 1))[at]
        stays = torch.ones(total + 1, dtype=torch.bool, device=device)
        stays = stays.scatter_(0, at.flatten(), False)[:total]
        before = pad(stays.cumsum(0), (1, 0))
        always = before[cu[1:]] - before[cu[:-1]]
        head, _ = _numbered(pages)
        place = torch.where(stays, before[:-1] - before[cu[head]], total)
        heads = torch.arange(len(always), device=device)
        behind = always[:, None] + torch.arange(most, device=device)
        head = torch.cat([head, heads.repeat_interleave(most, output_size=most * len(always))])
        place = torch.cat([place, behind.flatten()]).int()
        listing = Listing(pad(names, (0, 1)), pages.table, head, place, always.view(shape).int())
        if count is None:
            return listing
        at, begin = listing.placed(count)
        table = pages.table.new_zeros(total + 1).scatter_(0, at[:total], pages.table)
        return replace(listing, fixed=(table, at[total:], begin))

    def placed(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Places in a table of all pages of which every head picks a number, ``[T + B Hkv most]`` long, ``T`` for nowhere; and
        where heads begin, ``[B Hkv + 1]`` int32."""
        read = (self.always + counts).flatten()
        begin = pad(read.cumsum(0, dtype=torch.int32), (1, 0))
        at = torch.where(self.place < read[self.head], begin[self.head] + self.place, len(self.table))
        return at.long(), begin

    def read(self, pages: Pages, units: Tensor, counts: Tensor) -> Pages:
        """The ``pages`` that a step reads, for the picked ``units [B, 1 or Hkv, most]`` int32, ``counts [B, 1 or Hkv]`` of
        every head."""
        names = self.names.gather(2, units.long().expand(*self.names.shape[:2], -1)).flatten()
        if self.fixed is not None:
            table, at, begin = self.fixed
            table = table.scatter(0, at, names)
        else:
            at, begin = self.placed(counts)
            table = self.table.new_zeros(len(self.table) + 1).scatter_(0, at, torch.cat([self.table, names]))
        return replace(pages, table=table, cu_pages=begin, tokens=None)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept."""
        return [self.names, self.table, self.head, self.place, self.always, *(self.fixed or ())]


def _numbered(pages: Pages) -> tuple[Tensor, Tensor]:
    """Of every entry of the table its head, and its number within that, ``[T]`` long."""
    cu = pages.cu_pages.long()
    head = torch.repeat_interleave(cu.diff(), output_size=len(pages.table))
    return head, torch.arange(len(head), device=head.device) - cu[head]
