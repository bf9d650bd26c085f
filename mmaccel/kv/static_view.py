"""A cache whose tensors stay where they are while tokens are added: what captured decode steps read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from mmaccel_kernels.append import append
from torch import Tensor
from torch.nn.functional import pad

from .decoding import attend, on_gpu
from .growable import put, shown
from .index import KeyIndex, to_device
from .packed_keys import PackedKeys
from .ragged import Ragged
from .schedule_state import ScheduleState

#: sizes are multiples of it, so that prompts of different lengths are read by one captured step
ROUND = 64


class Layer(Protocol):
    """Layer protocol; see :class:`.packed.QuantisedLayer`."""

    keys: Any
    values: Any
    ragged: Ragged | None
    packed: PackedKeys
    schedule: ScheduleState
    seen: int
    window: int | None

    @property
    def index(self) -> KeyIndex:
        """Index of the stored keys."""

    @property
    def gapless(self) -> bool:
        """Whether the host knows that every place holds a key."""


@dataclass(frozen=True)
class WriteCursor:
    """Write cursor shared by layers of equal length.

    slot : ``[1]`` long, where the next token is written. filled : ``[1]`` long, how many keys there are then.
    visible : bool, the slots that hold a key; None where lengths alone say so.
    masked : whether torch's attention reads all there is room for under ``visible [B or 1, 1 or Hkv, 1, T]``, which the tokens
        to come are added to. Else :func:`.decoding.attend` reads what is ``filled``, and sees the tokens to come anyhow.
    places, window : what is ``visible`` moves on with a sliding window of so many places; ``[B, 1 or Hkv, 1, T]`` int32, those
        of all slots, far below zero where there is no key.
    weights, added : with proportional attention, what is added to the logits of all slots, ``[B, 1 or Hkv, 1, T]``; and the
        same with the least number that there is where nothing is ``visible``.
    """

    slot: Tensor
    filled: Tensor
    visible: Tensor | None
    masked: bool
    places: Tensor | None = None
    window: int = 0
    weights: Tensor | None = None
    added: Tensor | None = None

    def begin(self, place: Tensor) -> None:
        """The token of a ``place [1]`` comes: everybody sees it."""
        if self.visible is not None and self.places is not None:
            near = self.places > place - self.window
            torch.logical_and(near, self.places <= place, out=self.visible)
        elif self.visible is not None and self.masked:
            self.visible.index_fill_(3, self.slot, True)
        if self.weights is not None and self.added is not None and self.visible is not None:
            self.added.copy_(self.weights).masked_fill_(~self.visible, torch.finfo(self.added.dtype).min)

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        held = self.slot, self.filled, self.visible, self.places, self.weights, self.added
        yield from (x for x in held if x is not None)


class QuerySpec(NamedTuple):
    """Queries that a policy needs of the tokens to come: those of ``heads`` heads, and whether it observes all of them."""

    heads: int
    observed: bool


class Asked(NamedTuple):
    """The queries of a layer that a policy is to look at, ``[B, Hq, room, D]``, and where the next one is put, ``[1]`` long."""

    queries: Tensor
    slot: Tensor


class Reader(Protocol):
    """Chooses which keys of a layer a step reads, see :class:`.sparse.PinnedRead`."""

    def attend(self, layer: StaticLayerView, query: Tensor, scaling: float) -> Tensor:
        """See :meth:`StaticLayerView.attend`."""

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""

    def carried(self) -> Iterator[Tensor]:
        """Tensors that every token changes."""


@dataclass(frozen=True)
class StaticLayerView:
    """A layer while it is pinned: what ragged heads and pages hold is as it was, and tokens are added to ``keys`` and ``values
    [B, Hkv, T, D]``, up to ``end``. Where a step reads some keys only, the ``reader`` chooses them."""

    keys: Tensor
    values: Tensor
    ragged: Ragged | None
    packed: PackedKeys
    end: WriteCursor
    asked: Asked | None = None
    reader: Reader | None = None

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``key`` and ``value [B, Hkv, 1, D]`` behind the others; returns all that were added, and the room behind them."""
        append(self.keys, self.values, key, value, self.end.slot)
        return self.keys, self.values

    def ask(self, query: Tensor) -> None:
        """A token's ``query [B, Hq, 1, D]`` comes by: it is remembered where a policy is to observe it."""
        if self.asked is not None:
            self.asked.queries.index_copy_(2, self.asked.slot, query)

    @property
    def masked(self) -> bool:
        """Whether torch's attention reads everything, see :class:`WriteCursor`; else :meth:`attend` does."""
        return self.end.masked and self.reader is None

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attention of ``query [B, Hq, 1, D]`` over what is read, ``[B, 1, Hq, D]``; see :func:`.decoding.attend`."""
        if self.reader is not None:
            return self.reader.attend(self, query, scaling)
        return attend(self, query, self.end.visible, scaling, self.end.filled)

    def tensors(self) -> Iterator[Tensor]:
        """Everything held, beside where it ends."""
        yield from (self.keys, self.values)
        if self.ragged is not None:
            yield from (self.ragged.keys, self.ragged.values, self.ragged.bounds)
        for pages in self.packed.pages:
            if pages is not None:
                yield from pages.tensors()
        yield from self.asked or ()
        if self.reader is not None:
            yield from self.reader.tensors()


class StaticView:
    """The layers of a cache, pinned for ``steps`` tokens to come.

    Where the next token is written and who sees it is known on the device; the host counts the tokens in ``added``.
    ``query_spec``: where their queries are remembered, too. ``readers``: of the layers, by their numbers, of which a step
    reads some keys only. ``weights``: what is added to the logits of keys, see :class:`.shared.Shared`.

    owners, offset : layers of the cache, and what it knows of positions; see :class:`.shared.Shared`.
    layers : the same as they are read. ends : where they end; layers that store equally many share one.
    own : nobody else has seen the tensors that keys and values are in. serves : steps that they may be pinned for in all.
    positions : ``[B, 1]`` long, of the next token. place : ``[1]`` long, how many came before it.
    mask : ``[1, 1, 1, 1]`` bool, a placeholder where nobody looks.
    """

    def __init__(
        self,
        owners: Sequence[Layer],
        offset: Tensor,
        steps: int,
        query_spec: QuerySpec | None = None,
        readers: Mapping[int, Reader] | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.owners, self.steps, self.added, self.query_spec = owners, steps, 0, query_spec
        self.asked = [] if query_spec is None else [torch.zeros(1, dtype=torch.long, device=offset.device)]
        self.ends: list[WriteCursor] = []
        self.layers: list[StaticLayerView] = []
        found: dict[Any, WriteCursor] = {}
        self.own, self.serves = True, steps
        # layers that store all in one place, and the others
        longest = [max((o.keys.shape[2] for o in owners if _whole(o) == whole), default=0) for whole in (False, True)]
        for owner in owners:
            width = _rounded(longest[_whole(owner)] + steps, ROUND)
            # of ours no kernel takes weights
            masked = _whole(owner) and (weights is not None or not on_gpu(owner.keys))
            window = owner.window if owner.index.windowed(owner.window, steps) else None
            hidden = not owner.gapless or window is not None
            apart = hidden or weights is not None
            name = owner.keys.shape[2], masked, id(owner.index) if apart else None, window
            if name not in found:
                found[name] = _weighed(owner, _end(owner, width, masked, hidden, window), width, weights)
                self.ends.append(found[name])
            before = owner.keys.data_ptr()
            self.layers.append(_pinned(owner, width, found[name]))
            self.own = self.own and _whole(owner) and self.layers[-1].keys.data_ptr() != before
        if query_spec is not None:
            self.layers = [
                replace(layer, asked=_asked(layer.keys, query_spec.heads, steps, *self.asked)) for layer in self.layers
            ]
        for number, reader in (readers or {}).items():
            self.layers[number] = replace(self.layers[number], reader=reader)
        self.positions = (owners[0].seen - offset)[:, None].contiguous()
        self.place = to_device(torch.tensor([owners[0].seen]), offset.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=offset.device)

    @property
    def full(self) -> bool:
        """Whether all the tokens have come."""
        return self.added == self.steps

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or writes, beside the model's and its own token."""
        held = [x for layer in self.layers for x in layer.tensors()]
        return [*held, *(x for end in self.ends for x in end.tensors()), self.positions, self.place, self.mask]

    def counted(self) -> None:
        """A step is over: the host counts its token."""
        self.added += 1
        for owner in self.owners:
            owner.seen += 1

    def release(self) -> None:
        """Give layers and indices what was added, as if they had been there at every step. What a step that was broken off has
        written is behind that, where nobody looks."""
        seen = self.owners[0].seen
        for owner, layer in zip(self.owners, self.layers, strict=True):
            # layers that share an index extend it once
            places = torch.arange(seen - self.added, seen, device=owner.index.index.device)
            owner.index.extend(places.expand(len(owner.index.index), -1), False, seen)
            length = owner.keys.shape[2] + self.added
            owner.keys, owner.values = (shown(x, -2, length) for x in (layer.keys, layer.values))
            if layer.asked is not None and self.query_spec is not None and self.added:
                queries, at = layer.asked.queries[:, :, : self.added].clone(), places.to(torch.int32)
                owner.schedule.remember(queries, at.expand(len(queries), -1), self.query_spec.observed)

    def again(self, offset: Tensor, steps: int, query_spec: QuerySpec | None) -> bool:
        """Pin layers that were given back, and evicted from since, for ``steps`` tokens more, to the same tensors: what was
        captured goes on. False, and nothing is done, where they do not fit, or somebody may hold on to what is there."""
        if not self.own or query_spec != self.query_spec or any(layer.reader is not None for layer in self.layers):
            return False
        ends: dict[Any, WriteCursor] = {}
        for owner, layer in zip(self.owners, self.layers, strict=True):
            end, length = layer.end, owner.keys.shape[2]
            # packed or ragged layers, and slots without a key, are pinned to tensors of other sizes
            plain = _whole(owner) and owner.gapless and layer.ragged is None and end.places is None
            plain = plain and (end.masked or end.visible is None) and end.weights is None
            fits = owner.keys.shape[:2] == layer.keys.shape[:2] and length + steps <= layer.keys.shape[2]
            moved = owner.keys.untyped_storage().data_ptr() != layer.keys.untyped_storage().data_ptr()
            if not (plain and fits and moved and ends.setdefault(length, end) is end):
                return False
            if layer.asked is not None and steps > layer.asked.queries.shape[2]:
                return False
        for length, end in ends.items():
            end.slot.fill_(length)
            end.filled.fill_(length + 1)
            if end.visible is not None:
                end.visible.zero_()[..., :length] = True
        for owner, layer in zip(self.owners, self.layers, strict=True):
            for x, stored in ((layer.keys, owner.keys), (layer.values, owner.values)):
                x.narrow(2, 0, stored.shape[2]).copy_(stored)
            owner.keys, owner.values = (shown(x, -2, owner.keys.shape[2]) for x in (layer.keys, layer.values))
        self.positions.copy_((self.owners[0].seen - offset)[:, None])
        self.place.fill_(self.owners[0].seen)
        for slot in self.asked:
            slot.zero_()
        self.steps, self.added = steps, 0
        return True

    def begin(self) -> None:
        """A token comes: everybody sees it."""
        for end in self.ends:
            end.begin(self.place)

    def positions_like(self, given: Tensor | None) -> Tensor:
        """The positions of the token, for every axis that is ``given [axes, B, 1]``."""
        return self.positions if given is None or given.dim() == 2 else self.positions.expand(len(given), -1, -1)

    def end(self) -> None:
        """The token has gone through all layers."""
        for end in self.ends:
            end.slot.add_(1)
            end.filled.add_(1)
        for slot in self.asked:
            slot.add_(1)
        self.positions.add_(1)
        self.place.add_(1)

    def counters(self) -> list[Tensor]:
        """Counters that every token advances."""
        return [*(x for end in self.ends for x in (end.slot, end.filled)), *self.asked, self.positions, self.place]

    def remember(self) -> Callable[[], None]:
        """Remember the counters, and what is stored in the next slot and in the one before it.

        The function that comes back takes out the tokens that have come since, of which there may be two."""
        counters = [(x, x.clone()) for x in self.counters()]
        for layer in self.layers:
            counters += [(x, x.clone()) for x in (() if layer.reader is None else layer.reader.carried())]
        places = {id(end): torch.cat([(end.slot - 1).clamp(min=0), end.slot]) for end in self.ends}
        held = [(x, places[id(layer.end)]) for layer in self.layers for x in (layer.keys, layer.values)]
        stored = [x.index_select(2, at) for x, at in held]

        def restore() -> None:
            for counter, x in counters:
                counter.copy_(x)
            for (x, at), old in zip(held, stored, strict=True):
                x.index_copy_(2, at, old)

        return restore


def _whole(owner: Layer) -> bool:
    """Whether a layer stores all it has in one place."""
    return owner.ragged is None and not owner.packed


def _asked(like: Tensor, heads: int, room: int, slot: Tensor) -> Asked:
    """Room for the queries of so many tokens, of a layer with such keys."""
    return Asked(like.new_zeros(len(like), heads, room, like.shape[3]), slot)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


#: less than any place that a window may begin at
_NOWHERE = -(1 << 30)


def _end(owner: Layer, width: int, masked: bool, hidden: bool, window: int | None) -> WriteCursor:
    """Where a layer ends for which there is room up to ``width``; ``hidden`` if some of its slots are not to be seen, as they
    hold no key or are beyond a ``window``."""
    device, length, visible, places = owner.keys.device, owner.keys.shape[2], None, None
    if hidden:
        known = owner.index.by_head[:, :, None]
        before, more = known.shape[-1] - length, 0
        if owner.ragged is not None:
            more = _rounded(owner.ragged.longest, ROUND) - owner.ragged.longest
        coming = torch.arange(owner.seen, owner.seen + width - length, dtype=known.dtype, device=device)
        parts = pad(known[..., :before], (0, more), value=-1), known[..., before:], coming.expand(*known.shape[:3], -1)
        places = torch.cat(parts, dim=-1)
        visible = places >= 0
        if masked:
            visible[..., before + more + length :] = False
    elif masked:
        visible = torch.zeros(1, 1, 1, width, dtype=torch.bool, device=device)
        visible[..., :length] = True
    slot = to_device(torch.tensor([length]), device)
    if places is None or window is None:
        return WriteCursor(slot, slot + 1, visible, masked)
    return WriteCursor(slot, slot + 1, visible, masked, places.masked_fill(places < 0, _NOWHERE), window)


def _weighed(owner: Layer, end: WriteCursor, width: int, weights: Tensor | None) -> WriteCursor:
    """The same, where keys have weights; those of tokens to come are zero."""
    if weights is None:
        return end
    known = owner.index.weighed(weights, None, 1)
    known = pad(known, (0, width - known.shape[-1]))
    return replace(end, weights=known, added=known.clone())


def _pinned(owner: Layer, width: int, end: WriteCursor) -> StaticLayerView:
    """A layer with room up to ``width``. What it stored before is free at once."""
    keys, values = (put(x, -2, width) for x in (owner.keys, owner.values))
    owner.keys, owner.values = (shown(x, -2, owner.keys.shape[2]) for x in (keys, values))
    ragged = owner.ragged
    if ragged is not None:
        total, heads = len(ragged.keys), ragged.lengths.numel()
        flat, others = (put(x, 0, _rounded(total, ROUND * heads)) for x in (ragged.keys, ragged.values))
        ragged.keys, ragged.values = (shown(x, 0, total) for x in (flat, others))
        ragged = Ragged(flat, others, ragged.lengths, _rounded(ragged.longest, ROUND))
    return StaticLayerView(keys, values, ragged, owner.packed, end)
