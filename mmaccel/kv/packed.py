"""A cache layer that stores what codecs pack in pages, and the rest in full precision behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from mmaccel_kernels.compact import compact
from mmaccel_kernels.pages import Pages
from torch import Tensor
from torch.nn.functional import pad

from ..method.results import check_type
from .codecs import Eligible, TokenGroup
from .index import KeyIndex, leftmost, on_host, to_device
from .layer import CompressedLayer
from .ragged import Ragged
from .shared import Shared


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
    received : ``[B, Hkv, W]`` or None, see :class:`.layer.ScheduleState`.
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
        planes = [
            mine
            if mine.channels is None or other.channels is None
            else replace(mine, channels=torch.where(heads, other.channels, mine.channels))
            for mine, other in zip(self.pages.keys, like.pages.keys, strict=True)
        ]
        return replace(self.pages, keys=tuple(planes)), unused & ~theirs

    def extended(self, new: Pages, index: Tensor, due: Tensor, received: Tensor | None, count: Tensor) -> PackedGroup:
        """With ``new`` pages behind: the tokens ``due [B, 1 or Hkv, R]`` of those with this index and these figures, ``count
        [B, 1 or Hkv]`` on the CPU of every head."""
        held = self.known()
        held = Held(held.places + count, held.live + count)
        there = torch.zeros_like(self.index, dtype=torch.bool)
        if self.pages is not None:
            # dead places are places
            lengths = self.pages.lengths()[:, : self.index.shape[1], None]
            there = torch.arange(self.index.shape[-1], device=lengths.device) < lengths
        order, there, _ = leftmost(torch.cat([there, due], dim=-1), held.places)
        index = torch.cat([self.index, index], dim=-1).gather(2, order).masked_fill(~there, -1)
        if self.received is not None and received is not None:
            both = torch.cat([self.received, received], dim=-1)
            received = both.gather(2, order.expand(-1, both.shape[1], -1)).masked_fill(~there, 0.0)
        return PackedGroup(new if self.pages is None else self.pages.appended(new), index, received, held)

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


class QuantisedLayer(CompressedLayer):
    """The slots of :meth:`stored` are the places of the packed tokens of every head, group after group, then the tokens in full
    precision.

    packs : packed keys and values of every token group, None before the first are packed; ``widths``: slots they take, those
        of the longest head; ``held``: of each what the host knows of its tokens.
    dequantised : ``[B, 1 or Hkv]`` long, how many of the first tokens in full precision were packed once; None if none was.

    A token is packed once. It can be dropped; its place is then treated as described at
    :meth:`mmaccel_kernels.pages.Pages.compacted`. The last few tokens that share scales go back to full precision, as what
    their codes represent, when they take less memory so; they are not packed again.
    """

    def __init__(self, shared: Shared, number: int) -> None:
        super().__init__(shared, number)
        self.packs: tuple[Pages | None, ...] = ()
        self.widths: tuple[int, ...] = ()
        self.held: tuple[Held | None, ...] = ()
        self.dequantised: Tensor | None = None
        self._counted: tuple[tuple[Held | None, ...], int | None] | None = None

    @property
    def pages(self) -> Pages | None:
        """Packed keys of the first token group."""
        return self.packs[0] if self.packs else None

    @property
    def width(self) -> int:
        """Slots of all that is packed."""
        return sum(self.widths)

    @property
    def packed(self) -> bool:
        """Whether anything is, or was and has left pages."""
        for pages in self.packs:
            if pages is not None:
                return True
        return False

    @property
    def places(self) -> int | None:
        """See :class:`.layer.CompressedLayer`; those of packed tokens are among them."""
        # asked at every step; what is packed changes seldom
        if self._counted is None or self._counted[0] is not self.held:
            self._counted = self.held, self._packed_places()
        places, packed = super().places, self._counted[1]
        return None if places is None or packed is None else places + packed

    def _packed_places(self) -> int | None:
        """See :attr:`places`, of packed tokens alone."""
        places = 0
        for held in self.held:
            if held is None:
                return None
            places += int(held.places.sum()) * (self.keys.shape[1] // held.places.shape[1])
        return places

    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and values as ``[B, Hkv, K, D]``, packed ones decoded; short heads are padded (see ``index``)."""
        if len(self.packs) == 1 and (pages := self.packs[0]) is not None and self.ragged is None and pages.even:
            keys, values = (_behind(x, self.width) for x in (self.keys, self.values))
            pages.decoded_into(keys[:, :, : self.width], values[:, :, : self.width])
            return keys, values
        parts = [super().stored()]
        (batch, heads), dtype = parts[0][0].shape[:2], parts[0][0].dtype
        for pages, width in zip(self.packs, self.widths, strict=True):
            if pages is None:
                continue
            keys, values = pages.decoded(dtype)
            if len(keys) == batch * heads * width:
                # all heads are as long
                keys, values = (x.view(batch, heads, width, x.shape[1]) for x in (keys, values))
            else:
                keys, values = Ragged(keys, values, pages.lengths(), width).padded()
            parts.insert(len(parts) - 1, (keys, values))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([k for k, _ in parts], dim=2), torch.cat([v for _, v in parts], dim=2)

    def pack(
        self,
        group: TokenGroup,
        eligible: Eligible,
        made: dict[int, tuple[KeyIndex, KeyIndex]],
        query_energy: Tensor | None = None,
        count: Tensor | None = None,
    ) -> None:
        """Quantise what is due of one token group.

        Parameters
        ----------
        eligible : the places it may be of.
        made : old and new indices, so that layers which shared one go on sharing one.
        query_energy : ``[B, Hkv, D]`` float32, the mean square of the last queries, if the codec looks at them.
        count : ``[B, 1 or Hkv]`` long on the CPU, how many tokens of the group are in full precision, where it is known; else
            the host waits for it.
        """
        if self.empty or self.few(group, eligible):
            return
        valid = self.eligible_slots(eligible)
        count = valid.sum(-1).cpu() if count is None else count.expand(valid.shape[:2])
        count = group.codec.packable(count)
        if not bool(count.any()):
            return
        due = valid & (valid.cumsum(-1) <= group.codec.packable(valid.sum(-1))[..., None])
        old, groups = self.index, self._parted()
        rest, lengths = self.index.by_head, self.index.lengths - count
        keys, values = super().stored()
        every = count.expand(-1, keys.shape[1])
        flat = compact(keys, values, due.expand(-1, keys.shape[1], -1), total=int(every.sum()))
        empty = None if self.schedule.received is None else self.schedule.received[..., :0]
        none = Held(torch.zeros_like(count), torch.zeros_like(count))
        groups += [PackedGroup(None, rest[..., :0], empty, none)] * (group.number + 1 - len(groups))
        groups = [replace(one, held=one.known()) for one in groups]
        own = groups[group.number]
        before, unused = own.choices(groups[group.like])
        empty_heads = unused.expand_as(every) if before is not None and bool(unused.any()) else None
        packed = group.codec.pack(*flat, before, query_energy, every, empty_heads)
        new = check_type(group.codec, "pack()", packed, Pages)
        groups[group.number] = own.extended(new, rest, due, self.schedule.received, count)
        super().evict((rest >= 0) & ~due, (keys, values), lengths)
        self._join(groups)
        known = made.get(id(old))
        if known is not None:
            self.index = known[1]
        elif old.index.dim() == 2:
            made[id(old)] = (old, self.index)

    def few(self, group: TokenGroup, eligible: Eligible) -> bool:
        """Whether it is plain from what is stored in full precision that none of it is to be packed."""
        if self.empty:
            return True
        return eligible.others and len(self.index) - self.width < group.codec.residual + group.codec.page

    def eligible_slots(self, eligible: Eligible) -> Tensor:
        """Mask of the tokens in full precision that may be packed, ``[B, 1 or Hkv, R]`` bool."""
        rest = self.index.by_head[..., self.width :]
        return (rest >= 0) & ~self._once(rest) & eligible.holds(rest)

    @property
    def loose(self) -> Tensor | None:
        """Number of tokens in full precision that may be packed, ``[B, 1 or Hkv]`` long on the CPU; None where only the device
        knows."""
        if self.empty or not self.index.known or self.dequantised is not None or None in self.held:
            return None
        return self.index.lengths - sum(held.live for held in self.held if held is not None)

    def needed_on_host(self, kept: Tensor) -> list[Tensor]:
        """Tensors that the host must know to evict all but ``kept`` from packed keys; none where none are packed."""
        if not self.packed and self.dequantised is None:
            return []
        there = self.index.by_head >= 0
        known = [there, kept & there, *(x for pages in self.packs if pages is not None for x in pages.listing)]
        return known if self.dequantised is None else [*known, self.dequantised]

    def evict(
        self,
        kept: Tensor,
        merged: tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | None = None,
        known: Sequence[Tensor] | None = None,
    ) -> None:
        """Free everything but ``kept``. Packed tokens are dropped or stay as they are; ``merged`` does not reach them.
        ``known``: see :meth:`needed_on_host`, on the CPU; by default the host waits for it."""
        if not self.packed and self.dequantised is None:
            super().evict(kept, merged, lengths)
            return
        there, stays, *others = on_host(self.needed_on_host(kept)) if known is None else known
        listed: list[Pages | None] = []
        for pages in self.packs:
            if pages is not None:
                pages, others = pages.listed(*others[:4]), others[4:]
            listed.append(pages)
        index, received, width, widths = self.index, self.schedule.received, self.width, self.widths
        few, device = self._few(stays[..., :width], listed), index.index.device
        once, count, alive = few.sum(-1), stays[..., width:].sum(-1), stays[..., :width] & ~few
        if others:
            early = there[..., width:]
            early = early & (early.cumsum(-1) <= others[0][..., None])
            once = once + (stays[..., width:] & early).sum(-1)
        kept = kept & (index.by_head >= 0)
        packed, rest, dequantises = kept[..., :width], kept[..., width:], bool(few.any())
        if dequantises:
            merged = self.stored() if merged is None else merged
            moved = to_device(few, device)
            packed, rest, count = packed & ~moved, torch.cat([moved, rest], dim=-1), count + few.sum(-1)
        elif merged is not None:
            merged = merged[0][:, :, width:], merged[1][:, :, width:]
        parts = zip(self._parted(), packed.split(widths, dim=-1), alive.split(widths, dim=-1), listed, strict=True)
        groups = [group.kept(*part) for group, *part in parts]
        if dequantises:
            self.index, self.schedule.received = index, received
        super().evict(rest, merged, count)
        self._join(groups)
        self.dequantised = to_device(once, device) if dequantises or self.dequantised is not None else None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens seen; packed ones are cut off their pages."""
        if (not self.packed and self.dequantised is None) or int(tokens_to_remove) >= 0:
            super().crop(tokens_to_remove)
            return
        self.seen += int(tokens_to_remove)
        self.shared.crop(self.seen)
        self.schedule.crop(-int(tokens_to_remove))
        groups = [group.cropped(self.seen) for group in self._parted()]
        rest = self.index.by_head
        stays = (rest >= 0) & (rest < self.seen)
        if self.dequantised is not None:
            self.dequantised = (stays & self._once(rest)).sum(-1)
        super().evict(stays)
        self._join(groups)

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer holds."""
        yield from super().tensors()
        for pages in self.packs:
            if pages is not None:
                yield from pages.tensors()
        for held in self.held:
            yield from held or ()
        if self.dequantised is not None:
            yield self.dequantised

    def reset(self) -> None:
        """Back to empty, ready for another prompt."""
        super().reset()
        self.packs, self.widths, self.held, self.dequantised = (), (), (), None

    def _select(self, rows: Tensor) -> None:
        super()._select(rows)
        self.packs = tuple(pages and pages.selected(rows.to(pages.table.device)) for pages in self.packs)
        self.held = (None,) * len(self.packs)
        if self.dequantised is not None:
            self.dequantised = self.dequantised[rows.to(self.dequantised.device)]

    # --- what was packed --------------------------------------------------------------------------------------
    def once(self) -> Tensor:
        """``[B, 1 or Hkv, K]`` bool: which slots hold what is packed, or was once."""
        index = self.index.by_head
        return torch.cat([index[..., : self.width] >= 0, self._once(index[..., self.width :])], dim=-1)

    def _once(self, rest: Tensor) -> Tensor:
        """Which slots ``[B, 1 or Hkv, R]`` of the full-precision part hold what was packed once, bool."""
        there = rest >= 0
        return (
            torch.zeros_like(there)
            if self.dequantised is None
            else there & (there.cumsum(-1) <= self.dequantised[..., None])
        )

    def _few(self, kept: Tensor, listed: Sequence[Pages | None]) -> Tensor:
        """Which of the packed tokens ``kept [B, 1 or Hkv, W]`` are to be dequantised, on the CPU as these; ``listed``: the
        pages of every group with a listing there."""
        token = (self.keys.shape[-1] + self.values.shape[-1]) * self.keys.element_size()
        parts = []
        for pages, part in zip(listed, kept.split(self.widths, dim=-1), strict=True):
            if pages is None:
                continue
            live = part.expand(-1, pages.heads, -1)
            parts.append(pages.sparse(live.flatten(0, 1), token).view_as(live)[:, : kept.shape[1]])
        return torch.cat(parts, dim=-1) if parts else torch.zeros_like(kept)

    # --- the two parts ----------------------------------------------------------------------------------------
    def _parted(self) -> list[PackedGroup]:
        """Take what is packed away: a layer without pages is left, until :meth:`_join`."""
        index, received, ends = self.index.by_head, self.schedule.received, list(accumulate(self.widths, initial=0))
        if received is not None:
            # tokens that came after the last observation have no figures yet
            received = pad(received, (0, index.shape[-1] - received.shape[-1]))
            self.schedule.received = received[..., self.width :]
        groups = [
            PackedGroup(pages, index[..., start:stop], None if received is None else received[..., start:stop], held)
            for pages, held, start, stop in zip(self.packs, self.held, ends, ends[1:], strict=False)
        ]
        rest, lengths = index[..., self.width :], None
        if self.index.known and None not in self.held:
            lengths = self.index.lengths - sum(held.live for held in self.held if held is not None)
        self.packs, self.widths, self.held = (), (), ()
        self.index = KeyIndex(rest if rest.shape[1] > 1 else rest[:, 0], True, self.seen, lengths)
        return groups

    def _join(self, groups: list[PackedGroup]) -> None:
        """Put what is packed before what is stored."""
        indices = [*(group.index for group in groups), self.index.by_head]
        heads = max(index.shape[1] for index in indices)
        index = torch.cat([part.expand(-1, heads, -1) for part in indices], dim=-1)
        held = [group.known() for group in groups]
        lengths = (self.index.lengths + sum(one.live for one in held)).expand(-1, heads)
        padded = bool((lengths < index.shape[-1]).any())
        self.index = KeyIndex(index if heads > 1 else index[:, 0], padded, self.seen, lengths)
        if self.schedule.received is not None:
            figures = [group.received for group in groups if group.received is not None]
            self.schedule.received = torch.cat([*figures, self.schedule.received], dim=-1)
        self.packs = tuple(group.pages for group in groups)
        self.widths = tuple(group.index.shape[-1] for group in groups)
        self.held = tuple(held)


def _behind(x: Tensor, width: int) -> Tensor:
    """``x [B, heads, n, D]`` behind room for so many more."""
    whole = x.new_empty(*x.shape[:2], width + x.shape[2], x.shape[3])
    whole[:, :, width:] = x
    return whole
