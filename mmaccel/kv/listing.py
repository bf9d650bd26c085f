"""Packed pages as units of a sparse read: which of them compete, and the table of those that a step reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from mmaccel_kernels.pages import Pages
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class PageSlots:
    """Where the packed pages of every head stand among its slots.

    first : ``[B, heads, W]`` long, the first slot of the pages of a head, in their order; ``W`` for none.
    of : ``[B, heads, W]`` long, the page of every packed slot, by its number within the head; meaningless behind the last.
    """

    first: Tensor
    of: Tensor

    @staticmethod
    def make(pages: Pages, width: int, heads: int) -> PageSlots:
        """Of ``width`` packed slots; of the first head alone if ``heads`` is 1, since all are alike. Nothing waits."""
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
    """What the packed pages of one layer are called, so that a step can say in a table which of them it reads.

    names : ``[B, Hkv, P + 1]`` int32, the pages that compete; the last is none.
    at : ``[B, Hkv, most]`` long, the places in the table of those that are picked. table : ``[T + 1]`` int32, the pages that
    every step reads in their places; what is not listed is in the last. cu_pages : ``[B Hkv + 1]`` int32.
    """

    names: Tensor
    at: Tensor
    table: Tensor
    cu_pages: Tensor

    @staticmethod
    def make(pages: Pages, rivals: Tensor, count: Tensor, most: int) -> Listing:
        """Pages ``rivals [B, 1 or Hkv, P]`` long compete, by their numbers within heads, -1 for none; of these ``count [B, 1 or
        Hkv]``, at most ``most``, are read. Nothing waits."""
        cu, total, shape = pages.cu_pages.long(), len(pages.table), (pages.batch, pages.heads)
        rivals, count = rivals.expand(*shape, -1), count.long().expand(shape)
        at = torch.where(rivals >= 0, cu[:-1].view(*shape, 1) + rivals, total)
        names = pad(pages.table, (0, 1))[at]
        fixed = torch.ones_like(pad(pages.table, (0, 1)), dtype=torch.bool)
        fixed = fixed.scatter_(0, at.flatten(), False)[:total]
        before = pad(fixed.cumsum(0), (1, 0))
        always = (before[cu[1:]] - before[cu[:-1]]).view(shape)
        ends = pad((always + count).flatten().cumsum(0), (1, 0))
        head, _ = _numbered(pages)
        own = torch.where(fixed, ends[head] + before[:-1] - before[cu[head]], total)
        table = torch.zeros_like(pad(pages.table, (0, 1))).scatter_(0, own, pages.table)
        place = torch.arange(most, device=count.device)
        picked = torch.where(place < count[..., None], (ends[:-1].view(shape) + always)[..., None] + place, total)
        return Listing(pad(names, (0, 1)), picked, table, ends.int())

    def read(self, pages: Pages, units: Tensor) -> Pages:
        """Of ``pages`` those that a step reads, for the picked ``units [B, 1 or Hkv, most]`` int32."""
        names = self.names.gather(2, units.long().expand_as(self.at))
        table = self.table.scatter(0, self.at.flatten(), names.flatten())
        return replace(pages, table=table, cu_pages=self.cu_pages, tokens=None)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept."""
        return [self.names, self.at, self.table, self.cu_pages]


def _numbered(pages: Pages) -> tuple[Tensor, Tensor]:
    """Of every entry of the table its head, and its number within that, ``[T]`` long."""
    cu = pages.cu_pages.long()
    head = torch.repeat_interleave(cu.diff(), output_size=len(pages.table))
    return head, torch.arange(len(head), device=head.device) - cu[head]
