"""Packed keys of a layer, by token group: pages, and where the token of every place in them came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from mmaccel_kernels.pages import Pages, Plane
from torch import Tensor
from torch.nn.functional import pad

from .index import leftmost, to_device
from .ragged import Ragged
from .selection import Selection


class Held(NamedTuple):
    """Facts that the host knows about packed tokens: the ``places`` they have in their pages, and those that are ``live``,
    ``[B, 1 or Hkv]`` long each, on the CPU."""

    places: Tensor
    live: Tensor


@dataclass(frozen=True)
class PackedGroup:
    """Packed keys of one token group.

    pages : of all heads; None before the first are packed.
    index : ``[B, 1 or Hkv, W]``, where the token of every place of the pages came from; -1 for dead places, whose token was
        dropped, and behind the end of short heads.
    received : ``[B, Hkv, W]`` or None, see :class:`.schedule_state.ScheduleState`.
    held : how many places every head has, and how many tokens in them; None where only the device knows.
    """

    pages: Pages | None
    index: Tensor
    received: Tensor | None
    held: Held | None = None

    def known(self) -> Held:
        """``held``; the host waits for it if it must."""
        if self.held is not None:
            return self.held
        live = (self.index >= 0).sum(-1)
        if self.pages is None:
            places = torch.zeros_like(live)
        else:
            # heads with one index have as many places
            places = self.pages.lengths()[:, : live.shape[1]]
        return Held(*torch.stack([places, live]).cpu().unbind())

    def of_heads(self, heads: int) -> PackedGroup:
        """The same with an index for each of ``heads``, where all had one."""
        if self.index.shape[1] == heads:
            return self
        held = None if self.held is None else Held(*(x.expand(-1, heads) for x in self.held))
        return replace(self, index=self.index.expand(-1, heads, -1), held=held)

    def choices(self, like: PackedGroup) -> tuple[Pages | None, Tensor]:
        """The pages whose channels the next tokens of each head share, and the heads that have none, ``[B, 1 or Hkv]`` bool on
        the CPU. A head that has packed nothing in this group has the channels of the group ``like`` it."""
        unused = self.known().live == 0
        if self.pages is None:
            return like.pages, like.known().live == 0
        if self is like or like.pages is None or not bool(unused.any()):
            return self.pages, unused
        theirs = unused & (like.known().live > 0)
        heads = to_device(theirs.expand(-1, self.pages.heads), self.index.device).flatten()[:, None]
        sides = [
            tuple(_with_choices(*pair, heads) for pair in zip(mine, other, strict=True))
            for mine, other in ((self.pages.keys, like.pages.keys), (self.pages.values, like.pages.values))
        ]
        return replace(self.pages, keys=sides[0], values=sides[1]), unused & ~theirs

    def extended(self, pages: Pages, more: Selection, received: Tensor | None) -> PackedGroup:
        """With ``pages`` in place of its own, which hold ``more`` behind; ``received [B, Hkv, R]`` are the figures of all that
        these were selected from."""
        held, figures = self.known(), more.figures(received)
        held = Held(held.places + more.lengths, held.live + more.lengths)
        if self.pages is None:
            return PackedGroup(pages, more.index, figures, held)
        # dead places are places
        lengths = self.pages.lengths()[:, : self.index.shape[1], None]
        there = torch.arange(self.index.shape[-1], device=lengths.device) < lengths
        order, there, _ = leftmost(torch.cat([there, more.there], dim=-1), held.places)
        index = torch.cat([self.index, more.index], dim=-1).gather(2, order).masked_fill(~there, -1)
        if self.received is not None and figures is not None:
            both = torch.cat([self.received, figures], dim=-1)
            figures = both.gather(2, order.expand(-1, both.shape[1], -1)).masked_fill(~there, 0.0)
        return PackedGroup(pages, index, figures, held)

    def kept(self, kept: Tensor, alive: Tensor, listed: Pages | None) -> PackedGroup:
        """Only what is ``kept [B, 1 or Hkv, W]``, of which no place is dead; pages are written anew where that saves enough of
        them. ``alive`` is the same on the CPU, and ``listed`` the pages with a listing there."""
        heads, received = max(self.index.shape[1], kept.shape[1]), self.received
        if self.pages is None or listed is None:
            none = torch.zeros(self.index.shape[:2], dtype=torch.long)
            return replace(self, held=Held(none, none))
        index = self.index.expand(-1, heads, -1).masked_fill(~kept, -1)
        live = alive.expand(-1, heads, -1).sum(-1)
        if not bool(live.any()):
            none = torch.zeros_like(live)
            return PackedGroup(None, index[..., :0], None if received is None else received[..., :0], Held(none, none))
        made = listed.compacted(alive.expand(-1, self.pages.heads, -1).flatten(0, 1))
        if made is None:
            return PackedGroup(self.pages, index, received, Held(listed.lengths()[:, :heads], live))
        rows, device = len(index), index.device
        places = Held(made[0].lengths()[:, :heads], live)
        pages = made[0].listed(*(to_device(x, device) for x in made[0].listing))
        was = to_device(made[1], device).view(rows, self.pages.heads, -1)
        there, was = was >= 0, was.clamp(min=0)
        if received is not None:
            received = received.gather(2, was).masked_fill(~there, 0.0)
        there, was = there[:, :heads], was[:, :heads]
        return PackedGroup(pages, index.gather(2, was).masked_fill(~there, -1), received, places)

    def cropped(self, seen: int) -> PackedGroup:
        """Without the tokens from place ``seen`` on."""
        if self.pages is None:
            return self
        stays = (self.index >= 0) & (self.index < seen)
        # up to the last one; a layer may have pages and no token in them
        number = torch.arange(1, stays.shape[-1] + 1, device=stays.device)
        lengths = pad(stays * number, (1, 0)).amax(-1)
        width = int(lengths.max())
        pages = self.pages.cropped(lengths.expand(-1, self.pages.heads))
        received = None if self.received is None else self.received[..., :width]
        return PackedGroup(pages, self.index.masked_fill(~stays, -1)[..., :width], received)


def _with_choices(plane: Plane, other: Plane, heads: Tensor) -> Plane:
    """A plane with the channels and factors of another one in some ``heads [B Hkv, 1]`` bool, where both have some."""

    def chosen(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        return mine if mine is None or theirs is None else torch.where(heads, theirs, mine)

    return replace(plane, channels=chosen(plane.channels, other.channels), factor=chosen(plane.factor, other.factor))


@dataclass(frozen=True, eq=False)
class PackedKeys:
    """Packed keys and values of a layer, group after group.

    pages : of every token group, None before the first of its keys are packed. widths : slots they take, those of the longest
        head. held : what the host knows of them, None where only the device knows.
    dequantised : ``[B, 1 or Hkv]`` long, how many of the first tokens in full precision were packed once; None if none was.
    """

    pages: tuple[Pages | None, ...] = ()
    widths: tuple[int, ...] = ()
    held: tuple[Held | None, ...] = ()
    dequantised: Tensor | None = None

    @staticmethod
    def of(groups: Sequence[PackedGroup], dequantised: Tensor | None) -> PackedKeys:
        """The packed keys of these groups; the host waits for what it does not know of them."""
        return PackedKeys(
            tuple(group.pages for group in groups),
            tuple(group.index.shape[-1] for group in groups),
            tuple(group.known() for group in groups),
            dequantised,
        )

    @cached_property
    def any_pages(self) -> bool:
        """Whether any group has pages, whether or not tokens are left in them."""
        return any(pages is not None for pages in self.pages)

    @property
    def untouched(self) -> bool:
        """Whether no key of the layer is packed, and none was."""
        return not self.any_pages and self.dequantised is None

    @property
    def only(self) -> Pages | None:
        """The pages of a layer with one token group; None where there are more, or none."""
        return self.pages[0] if len(self.pages) == 1 else None

    @cached_property
    def width(self) -> int:
        """Slots of all groups."""
        return sum(self.widths)

    @cached_property
    def places(self) -> int | None:
        """Number of places in all pages, over all rows and heads; None where only the device knows."""
        places = 0
        for pages, held in zip(self.pages, self.held, strict=True):
            if held is None:
                return None
            places += 0 if pages is None else int(held.places.sum()) * (pages.heads // held.places.shape[1])
        return places

    @property
    def live(self) -> Tensor | int | None:
        """Number of packed tokens, ``[B, 1 or Hkv]`` long on the CPU, or 0; None where only the device knows."""
        return None if None in self.held else sum(held.live for held in self.held if held is not None)

    def split(self, index: Tensor, received: Tensor | None) -> list[PackedGroup]:
        """The groups, given ``index [B, 1 or Hkv, K]`` and ``received [B, Hkv, K]`` of all slots of the layer."""
        ends = list(accumulate(self.widths, initial=0))
        return [
            PackedGroup(pages, index[..., start:stop], None if received is None else received[..., start:stop], held)
            for pages, held, start, stop in zip(self.pages, self.held, ends, ends[1:], strict=False)
        ]

    def decoded(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of every group that has pages, ``[B, Hkv, width, D]`` each; short heads are padded."""
        for pages, width in zip(self.pages, self.widths, strict=True):
            if pages is None:
                continue
            keys, values = pages.decoded(dtype)
            if len(keys) == pages.batch * pages.heads * width:
                # all heads are as long
                shape = pages.batch, pages.heads, width
                yield keys.view(*shape, keys.shape[1]), values.view(*shape, values.shape[1])
            else:
                yield Ragged(keys, values, pages.lengths(), width).padded()

    def needed_on_host(self) -> list[Tensor]:
        """Tensors that :meth:`on_host` is given on the CPU."""
        needed = [x for pages in self.pages if pages is not None for x in pages.listing]
        return needed if self.dequantised is None else [*needed, self.dequantised]

    def on_host(self, needed: Sequence[Tensor]) -> PackedKeys:
        """The same with listings and ``dequantised`` on the CPU; for ``needed`` see :meth:`needed_on_host`."""
        left = iter(needed)
        pages = tuple(one and one.listed(*(next(left) for _ in one.listing)) for one in self.pages)
        return replace(self, pages=pages, dequantised=next(left, None))

    def packed_before(self, there: Tensor) -> Tensor:
        """Mask of the slots in full precision, ``there [B, 1 or Hkv, R]`` bool, whose keys were packed before."""
        if self.dequantised is None:
            return torch.zeros_like(there)
        return there & (there.cumsum(-1) <= self.dequantised[..., None])

    def cheaper_unpacked(self, kept: Tensor, token: int) -> Tensor:
        """Mask of the packed tokens ``kept [B, 1 or Hkv, W]`` bool that take less memory in full precision, where each takes
        ``token`` bytes; on the CPU, as are these and the listings."""
        parts = []
        for pages, part in zip(self.pages, kept.split(self.widths, dim=-1), strict=True):
            if pages is None:
                continue
            live = part.expand(-1, pages.heads, -1)
            parts.append(pages.sparse(live.flatten(0, 1), token).view_as(live)[:, : kept.shape[1]])
        return torch.cat(parts, dim=-1) if parts else torch.zeros_like(kept)

    def select(self, rows: Tensor) -> PackedKeys:
        """Keep, repeat or reorder rows of the batch."""
        dequantised = None if self.dequantised is None else self.dequantised[rows.to(self.dequantised.device)]
        pages = tuple(one and one.selected(rows.to(one.table.device)) for one in self.pages)
        return PackedKeys(pages, self.widths, (None,) * len(pages), dequantised)

    def moved(self, move: Callable[[Tensor, int], Tensor]) -> PackedKeys:
        """The same with codes and scales replaced by what ``move(x, dim)`` returns, which shows the same."""

        def plane(one: Plane) -> Plane:
            return one.with_rows(lambda x: move(x, 0), move(one.codes, 0))

        pages = (
            one and replace(one, keys=tuple(map(plane, one.keys)), values=tuple(map(plane, one.values)))
            for one in self.pages
        )
        return replace(self, pages=tuple(pages))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        for pages in self.pages:
            if pages is not None:
                yield from pages.tensors()
        for held in self.held:
            yield from held or ()
        if self.dequantised is not None:
            yield self.dequantised
