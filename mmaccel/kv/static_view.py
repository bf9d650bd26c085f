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
from .key_bias import KeyBias
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

    @property
    def bias(self) -> KeyBias | None:
        """Bias that packed keys lack."""


@dataclass(frozen=True)
class WriteCursor:
    """Write cursor shared by layers of equal length, for steps of at most ``n`` tokens.

    slot : ``[1]`` long, where the next token is written. filled : ``[1]`` long, how many keys there are behind the step.
    visible : bool, the slots that hold a key; None where lengths alone say so.
    masked : whether torch's attention reads all slots under the mask ``visible [B or 1, 1 or Hkv, n, T]``, to which every
        new token is added. Else :func:`.decoding.attend` reads the slots that are ``filled``, new tokens among them.
    places, window : with a sliding window of so many places, and for steps of several tokens, the places of all slots,
        ``[B, 1 or Hkv, 1, T]`` int32, far below zero where there is no key; ``visible`` is computed from them at every step.
    ahead : ``[n, 1]`` long, how far every token of a step is ahead of the first; None for steps of one token.
    weights, added : with proportional attention, weights added to the logits of all slots, ``[B, 1 or Hkv, 1, T]``; and the
        same ``[B, 1 or Hkv, n, T]`` with the lowest number of the dtype where a slot is not ``visible``.
    """

    slot: Tensor
    filled: Tensor
    visible: Tensor | None
    masked: bool
    places: Tensor | None = None
    window: int = 0
    ahead: Tensor | None = None
    weights: Tensor | None = None
    added: Tensor | None = None

    def begin(self, place: Tensor, count: int) -> None:
        """Make the ``count`` tokens from ``place [1]`` on visible."""
        if self.ahead is not None:
            torch.add(self.slot, count, out=self.filled)
            place = place + self.ahead
        if self.visible is not None and self.places is not None:
            near = self.places > place - self.window
            torch.logical_and(near, self.places <= place, out=self.visible)
        elif self.visible is not None and self.masked:
            self.visible.index_fill_(3, self.slot, True)
        if self.weights is not None and self.added is not None and self.visible is not None:
            self.added.copy_(self.weights).masked_fill_(~self.visible, torch.finfo(self.added.dtype).min)

    def seen_by(self, count: int) -> Tensor | None:
        """``visible`` of a step of ``count`` tokens."""
        return None if self.visible is None else self.visible[:, :, :count]

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        held = self.slot, self.filled, self.visible, self.places, self.ahead, self.weights, self.added
        yield from (x for x in held if x is not None)


class QuerySpec(NamedTuple):
    """Queries of new tokens that a policy needs: how many ``heads`` they have, and whether it observes all of them."""

    heads: int
    observed: bool


class QueryBuffer(NamedTuple):
    """The queries of a layer since it was pinned, ``[B, Hq, room, D]``, and where the next one is put, ``[1]`` long."""

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
    """A layer while it is pinned: ragged heads and pages do not change, and tokens are written to ``keys`` and ``values
    [B, Hkv, T, D]`` at the ``cursor``, and to ``queries`` if a policy needs those. The ``reader`` chooses the keys of a step
    that reads only some. ``bias`` is what packed keys lack, whose ``places`` are ``[B, 1 or Hkv, width]``."""

    keys: Tensor
    values: Tensor
    ragged: Ragged | None
    packed: PackedKeys
    cursor: WriteCursor
    queries: QueryBuffer | None = None
    reader: Reader | None = None
    bias: KeyBias | None = None
    places: Tensor | None = None

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``key`` and ``value [B, Hkv, q, D]`` at the cursor; returns ``keys`` and ``values`` with all their room."""
        append(self.keys, self.values, key, value, self.cursor.slot)
        return self.keys, self.values

    def note_query(self, query: Tensor) -> None:
        """Store a token's ``query [B, Hq, 1, D]`` if a policy needs it."""
        if self.queries is not None:
            self.queries.queries.index_copy_(2, self.queries.slot, query)

    @property
    def masked(self) -> bool:
        """Whether torch's attention reads all slots, see :class:`WriteCursor`; else :meth:`attend` does."""
        return self.cursor.masked and self.reader is None

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attention of ``query [B, Hq, q, D]`` over the keys that are read, ``[B, q, Hq, D]``; see :func:`.decoding.attend`."""
        if self.reader is not None:
            return self.reader.attend(self, query, scaling)
        return attend(self, query, self.cursor.seen_by(query.shape[2]), scaling, self.cursor.filled)

    def bias_products(self, query: Tensor) -> Tensor | None:
        """See :meth:`.packed.QuantisedLayer.bias_products`."""
        if self.bias is None or self.places is None:
            return None
        return self.bias.products(query, self.places)

    def tensors(self) -> Iterator[Tensor]:
        """Everything held but the cursor, which layers share."""
        yield from (self.keys, self.values)
        if self.ragged is not None:
            yield from (self.ragged.keys, self.ragged.values, self.ragged.bounds)
        for pages in self.packed.pages:
            if pages is not None:
                yield from pages.tensors()
        yield from self.queries or ()
        if self.bias is not None and self.places is not None:
            yield from (self.bias.vector, *self.bias.rotations.tensors(), self.places)
        if self.reader is not None:
            yield from self.reader.tensors()


class StaticView:
    """The layers of a cache, pinned for ``steps`` new tokens.

    Cursors, masks and positions of the next tokens are on the device; the host counts the tokens in ``added``. A step adds up
    to ``block`` tokens, of which :meth:`crop` forgets those that were only drafted: nothing is copied.

    Parameters
    ----------
    owners : layers of the cache. offset : ``[B]`` long, see :class:`.positions.NextPositions`.
    query_spec : the queries that a policy needs of the new tokens; None for none.
    readers : by the number of the layer, of those of which a step reads only some keys.
    weights : ``[B, n]``, see :class:`.places.Places`.
    block : the most tokens of a step; one where there are readers, or queries that a policy needs.

    Attributes
    ----------
    layers : the layers as they are read. cursors : their write cursors, one for all layers of equal length.
    exclusive : nobody else has seen the tensors that keys and values are in. expected_steps : steps that they may be pinned for
        in all.
    positions : ``[B, block]`` long, of the next tokens. place : ``[1]`` long, how many tokens came before it.
    mask : ``[1, 1, 1, 1]`` bool, a placeholder that nothing reads.
    """

    def __init__(
        self,
        owners: Sequence[Layer],
        offset: Tensor,
        steps: int,
        query_spec: QuerySpec | None = None,
        readers: Mapping[int, Reader] | None = None,
        weights: Tensor | None = None,
        block: int = 1,
    ) -> None:
        self.owners, self.steps, self.added, self.query_spec, self.block = owners, steps, 0, query_spec, block
        self.query_slots = [] if query_spec is None else [torch.zeros(1, dtype=torch.long, device=offset.device)]
        self.cursors: list[WriteCursor] = []
        self.layers: list[StaticLayerView] = []
        cursors: dict[Any, WriteCursor] = {}
        self.exclusive, self.expected_steps = True, steps
        # layers that store all in one place, and the others
        longest = [max((o.keys.shape[2] for o in owners if _whole(o) == whole), default=0) for whole in (False, True)]
        for owner in owners:
            width = _rounded(longest[_whole(owner)] + steps, ROUND)
            # no kernel of mmaccel takes weights
            masked = _whole(owner) and (weights is not None or not on_gpu(owner.keys))
            window = owner.window if owner.index.windowed(owner.window, steps) else None
            # several tokens see each other causally, which a mask has to say where a kernel does not
            hidden = not owner.gapless or window is not None or (masked and block > 1)
            by_index = hidden or weights is not None
            name = owner.keys.shape[2], masked, id(owner.index) if by_index else None, window
            if name not in cursors:
                cursor = _cursor(owner, width, masked, hidden, window, block)
                cursors[name] = _weigh(owner, cursor, width, weights, block)
                self.cursors.append(cursors[name])
            before = owner.keys.data_ptr()
            self.layers.append(_view(owner, width, cursors[name]))
            self.exclusive = self.exclusive and _whole(owner) and self.layers[-1].keys.data_ptr() != before
        if query_spec is not None:
            self.layers = [
                replace(layer, queries=_query_buffer(layer.keys, query_spec.heads, steps, *self.query_slots))
                for layer in self.layers
            ]
        for number, reader in (readers or {}).items():
            self.layers[number] = replace(self.layers[number], reader=reader)
        self.positions = (owners[0].seen - offset)[:, None] + torch.arange(block, device=offset.device)
        self.place = to_device(torch.tensor([owners[0].seen]), offset.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=offset.device)

    def full(self, count: int) -> bool:
        """Whether ``count`` more tokens would be more than ``steps``."""
        return self.added + count > self.steps

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or writes, beside the model's and its own token."""
        held = [x for layer in self.layers for x in layer.tensors()]
        return [*held, *(x for cursor in self.cursors for x in cursor.tensors()), self.positions, self.place, self.mask]

    def count_step(self, count: int) -> None:
        """Count the ``count`` tokens of a step on the host."""
        self.added += count
        for owner in self.owners:
            owner.seen += count

    def crop(self, count: int) -> None:
        """Forget the last ``count`` tokens: what was written of them lies behind the cursors, where nothing reads."""
        if count:
            self.count_step(-count)
            for counter in self.counters():
                counter.sub_(count)

    def release(self) -> None:
        """Add the new tokens to layers and indices, as ordinary steps would have. A step that was broken off has written
        behind them, where nothing reads."""
        seen = self.owners[0].seen
        for owner, layer in zip(self.owners, self.layers, strict=True):
            # layers that share an index extend it once
            places = torch.arange(seen - self.added, seen, device=owner.index.index.device)
            owner.index.extend(places.expand(len(owner.index.index), -1), False, seen)
            length = owner.keys.shape[2] + self.added
            owner.keys, owner.values = (shown(x, -2, length) for x in (layer.keys, layer.values))
            if layer.queries is not None and self.query_spec is not None and self.added:
                queries, at = layer.queries.queries[:, :, : self.added].clone(), places.to(torch.int32)
                owner.schedule.remember(queries, at.expand(len(queries), -1), self.query_spec.observed)

    def reuse(self, offset: Tensor, steps: int, query_spec: QuerySpec | None, block: int) -> bool:
        """Pin layers that were released, and evicted from since, for ``steps`` more tokens to the same tensors, so that
        captured steps stay valid. False, and nothing is done, where they do not fit or somebody may hold these tensors."""
        if (
            not self.exclusive
            or (query_spec, block) != (self.query_spec, self.block)
            or any(layer.reader is not None for layer in self.layers)
        ):
            return False
        cursors: dict[Any, WriteCursor] = {}
        for owner, layer in zip(self.owners, self.layers, strict=True):
            cursor, length = layer.cursor, owner.keys.shape[2]
            # packed or ragged layers, and slots without a key, are pinned to tensors of other sizes
            plain = _whole(owner) and owner.gapless and layer.ragged is None and cursor.places is None
            plain = plain and (cursor.masked or cursor.visible is None) and cursor.weights is None
            fits = owner.keys.shape[:2] == layer.keys.shape[:2] and length + steps <= layer.keys.shape[2]
            moved = owner.keys.untyped_storage().data_ptr() != layer.keys.untyped_storage().data_ptr()
            if not (plain and fits and moved and cursors.setdefault(length, cursor) is cursor):
                return False
            if layer.queries is not None and steps > layer.queries.queries.shape[2]:
                return False
        for length, cursor in cursors.items():
            cursor.slot.fill_(length)
            cursor.filled.fill_(length + 1)
            if cursor.visible is not None:
                cursor.visible.zero_()[..., :length] = True
        for owner, layer in zip(self.owners, self.layers, strict=True):
            for x, stored in ((layer.keys, owner.keys), (layer.values, owner.values)):
                x.narrow(2, 0, stored.shape[2]).copy_(stored)
            owner.keys, owner.values = (shown(x, -2, owner.keys.shape[2]) for x in (layer.keys, layer.values))
        self.positions.copy_((self.owners[0].seen - offset)[:, None] + torch.arange(block, device=offset.device))
        self.place.fill_(self.owners[0].seen)
        for slot in self.query_slots:
            slot.zero_()
        self.steps, self.added = steps, 0
        return True

    def begin_step(self, count: int) -> None:
        """Make the ``count`` tokens of a step visible in all layers."""
        for cursor in self.cursors:
            cursor.begin(self.place, count)

    def positions_of(self, count: int, given: Tensor | None) -> Tensor:
        """The positions of the ``count`` tokens of a step, for every axis that is ``given [axes, B, count]``."""
        positions = self.positions[:, :count]
        return positions if given is None or given.dim() == 2 else positions.expand(len(given), -1, -1)

    def end_step(self, count: int) -> None:
        """Advance the counters behind the ``count`` tokens of a step."""
        for counter in self.counters():
            counter.add_(count)

    def counters(self) -> list[Tensor]:
        """Counters that every step advances."""
        ends = [x for cursor in self.cursors for x in (cursor.slot, cursor.filled)]
        return [*ends, *self.query_slots, self.positions, self.place]

    def remember(self) -> Callable[[], None]:
        """Remember the counters, and what the slots of the next step and of the one before it hold. The function that is
        returned undoes the steps since then, two at most."""
        counters = [(x, x.clone()) for x in self.counters()]
        for layer in self.layers:
            counters += [(x, x.clone()) for x in (() if layer.reader is None else layer.reader.carried())]
        near = torch.arange(-self.block, self.block, device=self.place.device)
        slots = {id(one): (one.slot + near).clamp(min=0) for one in self.cursors}
        held = [(x, slots[id(layer.cursor)]) for layer in self.layers for x in (layer.keys, layer.values)]
        stored = [x.index_select(2, at) for x, at in held]

        def restore() -> None:
            for counter, x in counters:
                counter.copy_(x)
            for (x, at), old in zip(held, stored, strict=True):
                x.index_copy_(2, at, old)

        return restore


def _whole(owner: Layer) -> bool:
    """Whether a layer has no ragged heads and no pages."""
    return owner.ragged is None and not owner.packed.any_pages


def _query_buffer(like: Tensor, heads: int, room: int, slot: Tensor) -> QueryBuffer:
    """Room for the queries of ``room`` tokens in a layer whose keys are ``like`` these."""
    return QueryBuffer(like.new_zeros(len(like), heads, room, like.shape[3]), slot)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


#: less than any place that a window may begin at
_NOWHERE = -(1 << 30)


def _cursor(owner: Layer, width: int, masked: bool, hidden: bool, window: int | None, block: int) -> WriteCursor:
    """Cursor of a layer with room for ``width`` keys, and for steps of at most ``block`` tokens; ``hidden``: some of its slots
    hold no key, or are not seen by all tokens of a step."""
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
    slot, ahead = to_device(torch.tensor([length]), device), None
    if block > 1:
        ahead = torch.arange(block, device=device)[:, None]
        visible = None if visible is None else visible.repeat(1, 1, block, 1)
    if places is None or (window is None and ahead is None):
        return WriteCursor(slot, slot + 1, visible, masked, ahead=ahead)
    places = places.masked_fill(places < 0, _NOWHERE)
    return WriteCursor(slot, slot + 1, visible, masked, places, -_NOWHERE if window is None else window, ahead)


def _weigh(owner: Layer, cursor: WriteCursor, width: int, weights: Tensor | None, block: int) -> WriteCursor:
    """The ``cursor`` with the weights of keys, if they have any; those of new tokens are zero."""
    if weights is None:
        return cursor
    known = owner.index.weighed(weights, None, 1)
    known = pad(known, (0, width - known.shape[-1]))
    return replace(cursor, weights=known, added=known.repeat(1, 1, block, 1))


def _view(owner: Layer, width: int, cursor: WriteCursor) -> StaticLayerView:
    """A layer with room for ``width`` keys; the tensors that it had are freed at once."""
    keys, values = (put(x, -2, width) for x in (owner.keys, owner.values))
    owner.keys, owner.values = (shown(x, -2, owner.keys.shape[2]) for x in (keys, values))
    ragged = owner.ragged
    if ragged is not None:
        total, heads = len(ragged.keys), ragged.lengths.numel()
        flat, others = (put(x, 0, _rounded(total, ROUND * heads)) for x in (ragged.keys, ragged.values))
        ragged.keys, ragged.values = (shown(x, 0, total) for x in (flat, others))
        ragged = Ragged(flat, others, ragged.lengths, _rounded(ragged.longest, ROUND))
    bias, places = owner.bias, None
    if bias is not None and owner.packed.any_pages:
        # ordinary steps note more rotations in other tensors
        bias = replace(bias, rotations=bias.rotations.copy())
        places = owner.index.by_head[..., : owner.packed.width].contiguous()
    return StaticLayerView(keys, values, ragged, owner.packed, cursor, bias=bias, places=places)
