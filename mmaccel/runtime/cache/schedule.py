"""Eviction while decoding and in later turns: when it is time, a layer that holds too much loses the keys that rank lowest.

It is done when a forward is over, for all layers together: they are the rows of one batch. Nothing happens in the steps
between: queries are remembered as they are, and the policy observes them together before keys are chosen. How many keys stay
is known to the host, so that it does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.layer_batch import Asking, InStep, LayerBatch, batches, size
from ...kv.merged_keys import MergedKeys
from ...kv.packed import QuantisedLayer
from ...kv.select import observed, per_head, rank
from ...kv.static_view import QuerySpec
from ...method import KeyBatch, LayerAttention, Policy
from .rules import CacheRules
from .token_origins import UNBOUNDED, cells_at, question_span, room_by_age

#: queries that are remembered at most before the policy observes them
LATEST = 64
#: bytes of keys and values that are copied at once
BYTES = 1 << 28


class Schedule:
    """The options ``every``, ``cap``, ``growth`` and ``age`` of a policy, see :class:`mmaccel.method.keys.CacheOptions`."""

    def __init__(self, stage: CacheRules, state: CacheState) -> None:
        self.stage, self.policy, self.state, self.shared = stage, stage.policy, state, state.shared

    # --- layer by layer ---------------------------------------------------------------------------------------
    def begin(self, layer: QuantisedLayer, rows: Tensor | None = None, padding: Tensor | None = None) -> None:
        """A prompt is over: from here on a layer may hold as many keys as now, or as many as the cap allows.

        rows : ``[B]`` bool, the rows that had a prompt with pictures, by default all; the others continue behind ``padding
            [B]`` long tokens of this forward that are padding. Both on the CPU.
        """
        schedule, lengths, now = layer.schedule, layer.head_lengths, [layer.seen] * len(layer.keys)
        if rows is None or schedule.capacity is None:
            schedule.capacity, schedule.settled, schedule.evicted = lengths, now, now
            return
        self.skip(layer, padding)
        schedule.capacity = torch.where(rows[:, None], lengths, schedule.capacity)
        schedule.settled, schedule.evicted = (
            [layer.seen if new else seen for new, seen in zip(rows.tolist(), known, strict=True)]
            for known in (schedule.settled, schedule.evicted)
        )

    def skip(self, layer: QuantisedLayer, padding: Tensor | None) -> None:
        """Do not count ``padding [B]`` long on the CPU as tokens that a layer has seen since."""
        if padding is not None:
            schedule, pads = layer.schedule, padding.tolist()
            schedule.settled, schedule.evicted = (
                [seen + pad for seen, pad in zip(known, pads, strict=True)]
                for known in (schedule.settled, schedule.evicted)
            )

    def note(
        self,
        layer: QuantisedLayer,
        query: Tensor,
        places: Tensor,
        scaling: float,
        window: int | None,
        padding: Tensor | None = None,
    ) -> None:
        """Remember ``query [B, Hq, q, D]`` of ``places [B, q]`` that follows a prompt; for ``padding`` see :meth:`skip`."""
        schedule, policy = layer.schedule, self.policy
        schedule.scaling, schedule.window = scaling, window
        if schedule.capacity is None:
            self.begin(layer)
        else:
            self.skip(layer, padding)
        if policy.observes and policy.observes_steps:
            schedule.unseen += query.shape[2]
        if schedule.unseen or policy.window:
            schedule.remember(query, places)
            schedule.keep(max(schedule.unseen, policy.window))

    # --- all layers -------------------------------------------------------------------------------------------
    def catch_up(self, first_time: Tensor | None) -> None:
        """Let the policy observe the remembered queries: a prompt begins. Rows that have a picture for the ``first_time``,
        ``[B]`` bool on the CPU, forget theirs."""
        for together in self._batches([layer for layer in self.state.layers if layer.schedule.unseen]):
            self._observe(together)
        if first_time is not None and bool(first_time.any()):
            for layer in self.state.layers:
                layer.schedule.forget(first_time)

    def finalize(self, pictured: Tensor | None) -> None:
        """A forward is over: evict from layers that hold more than they may, if it is time.

        pictured : ``[B]`` bool on the CPU, the rows that had a prompt with pictures; None where none had.
        """
        full, late = {}, []
        for layer in self.state.layers:
            if (room := self._room(layer, pictured)) is not None:
                full[layer.number] = room
            elif layer.schedule.unseen >= LATEST:
                late.append(layer)
        for together in self._batches(late):
            self._observe(together)
        _in_step(
            self._batches([layer for layer in self.state.layers if layer.number in full]),
            lambda together: self._shrink(together, torch.cat([full[layer.number] for layer in together.layers])),
        )

    def drop_old(self, table: Tensor) -> None:
        """A prompt is over: evict from pictures what their age does not allow (``age`` and ``age_step`` of the policy).

        table : ``[B, n, 4]`` int32 on the CPU, see :func:`.token_origins.prompt_grid`.
        """
        room = room_by_age(table, self.policy.age, self.policy.age_step)
        if bool((room < UNBOUNDED).any()):
            _in_step(self._batches(self.state.layers), lambda together: _age(self, together, room))

    def _room(self, layer: QuantisedLayer, pictured: Tensor | None) -> Tensor | None:
        """Limit of keys of each head of a layer, ``[B, Hkv]`` long on the CPU; None if none holds more, or eviction is not due.
        Rows in which it is not due may keep all that they hold."""
        policy, schedule = self.policy, layer.schedule
        if schedule.capacity is None or not (policy.every or policy.cap):
            return None
        if pictured is None and layer.seen - min(schedule.evicted) < policy.every:
            return None
        if policy.cap and len(layer.index) <= policy.cap:
            return None
        due = torch.tensor([layer.seen - seen >= policy.every for seen in schedule.evicted])
        if pictured is not None:
            due = torch.where(pictured, torch.tensor(policy.cap > 0), due)
        held = layer.head_lengths
        room = torch.where(due[:, None], room_of(policy, layer), held)
        over = (held > room).any(1)
        if not bool(over.any()):
            return None
        # each row has its own time, whatever the others have
        schedule.evicted = [
            layer.seen if one else seen for one, seen in zip(over.tolist(), schedule.evicted, strict=True)
        ]
        return torch.minimum(room, held)

    def _batches(self, layers: list[QuantisedLayer]) -> Iterator[LayerBatch]:
        """Layers that can be rows of one batch, as many at a time as do not take too much memory."""
        return batches(layers, self._kind, BYTES)

    def _kind(self, layer: QuantisedLayer) -> Hashable:
        """Key that is equal in layers that are rows of one batch."""
        schedule = layer.schedule
        alone = layer.number if self.policy.by_layer else None
        return alone, schedule.unseen, tuple(x.shape for x in schedule.queries), schedule.scaling, schedule.window

    def _observe(self, together: LayerBatch) -> None:
        """Let the policy observe the queries that it has not seen."""
        schedule = together.layers[0].schedule
        if not schedule.unseen:
            return
        query, places = together.queries(schedule.unseen)
        keys, visible = together.stored[0], together.mask(places, schedule.window)
        before = keys.new_zeros(keys.shape[:3], dtype=torch.float32) if together.received is None else together.received
        answer = self._answer(together)
        age = None if answer is None else (places - answer[:, None]).clamp(min=0)
        if (merged := self.shared.memory(MergedKeys)) is not None and together.merged is not None:
            query, keys = merged.widened(query, keys, together.merged, schedule.scaling)
        attention = LayerAttention(query, keys, visible, schedule.scaling, places >= 0, places=places, age=age)
        together.observed(observed(self.policy, attention, before))
        for layer in together.layers:
            layer.schedule.keep(self.policy.window)

    def _shrink(self, together: LayerBatch, room: Tensor) -> Asking:
        """Keep the best ``room [R, Hkv]`` of all keys that every head of some layers stores, from whichever turn."""
        self._observe(together)
        policy, held = self.policy, together.lengths
        table = self._table(together)
        batch, order = self.stored(together, table)
        heads = len(batch.valid) // len(room)
        wanted = (room if heads > 1 else room[:, :1]).reshape(-1)
        stay, fixed, candidates = wanted, None, batch.valid
        if not policy.joint and self.stage.text_retain is None:
            candidates = batch.visual & batch.valid
            fixed = batch.valid & ~candidates
            # only the device knows how much of it is text
            (text,) = yield [fixed.sum(1)]
            wanted, stay = (wanted - text).clamp(min=0), torch.maximum(wanted, text)
        kept = _best(policy, batch, order, table, [(candidates, wanted)], fixed, heads, len(together.layers))
        yield from self.stage.evicting(together, kept, torch.minimum(held, stay.view(-1, heads)))

    def cut(
        self, layer: QuantisedLayer, table: Tensor, rows: Tensor, since: int, count: Tensor, rivals: Tensor
    ) -> None:
        """Keep the best keys of a prompt that is not read to its end: ``count [B]`` of the ``rivals [B]`` that each head has
        from place ``since`` on, both on the CPU, in the ``rows [B]`` bool with pictures; all others stay.

        table : ``[B, n, 4]`` int32, see :func:`.token_origins.prompt_grid`.
        """
        together, policy = LayerBatch([layer]), self.policy
        batch, order = self.stored(together, table)
        heads = len(batch.valid) // len(count)
        candidates = (
            batch.valid & (batch.index >= since) & to_device(rows, batch.valid.device).repeat_interleave(heads)[:, None]
        )
        candidates = candidates if policy.joint else candidates & batch.visual
        wanted = count.repeat_interleave(heads)
        kept = _best(policy, batch, order, table, [(candidates, wanted)], batch.valid & ~candidates, heads, 1)
        lengths = together.lengths - (rivals - torch.minimum(rivals, count))[:, None]
        part = InStep()
        part.begin(self.stage.evicting(together, kept, lengths))
        part.finish()

    def _answer(self, together: LayerBatch, heads: int = 1) -> Tensor | None:
        """``[R heads]`` long, the place at which the answer of every row begins, if the policy asks for it."""
        if not self.policy.needs_age or not together.layers[0].schedule.settled:
            return None
        settled = torch.tensor([seen for layer in together.layers for seen in layer.schedule.settled])
        return to_device(settled.repeat_interleave(heads), together.index.device)

    def _table(self, together: LayerBatch) -> Tensor:
        """``[B, n, 4]`` int32 (picture, t, row, column) of all places up to the end of the last prompt."""
        if self.shared.places.grid_table is not None:
            return self.shared.places.grid_table
        return together.index.new_full((together.rows, 1, 4), -1)

    def stored(self, together: LayerBatch, table: Tensor) -> tuple[KeyBatch, Tensor | None]:
        """All that layers store, padding in front, and the slot of each key ``[R, K]``, None if they are in order; where heads
        differ every (row, head) is a row."""
        (keys, values), index, schedule = together.stored, together.index.long(), together.layers[0].schedule
        received, merged, heads, outgoing = together.received, together.merged, index.shape[1], None
        queries, places = keys.new_empty(len(keys), keys.shape[1], 0, keys.shape[3]), index[:, 0, :0]
        if self.policy.window and schedule.queries:
            queries, places = together.queries(self.policy.window)
        if self.policy.needs_outgoing:
            each = zip(together.layers, values.split(together.rows), strict=True)
            norms = [self.stage.outgoing(layer.number, mine) for layer, mine in each]
            outgoing = torch.cat([x for x in norms if x is not None])
        index = index.flatten(0, 1)
        if heads > 1:
            keys, values = keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
            queries = queries.unflatten(1, (heads, -1)).flatten(0, 1)
            figures = received, merged, outgoing
            received, merged, outgoing = (None if x is None else x.flatten(0, 1)[:, None] for x in figures)
        # by place: packed pictures are stored before text that is older
        order = None if together.in_order else index.argsort(dim=1, stable=True)

        def sorted_(x: Tensor) -> Tensor:
            if order is None:
                return x
            at = order[:, None].expand(x.shape[:3])
            return x.gather(2, at if x.dim() == 3 else at[..., None].expand_as(x))

        index = sorted_(index[:, None])[:, 0]
        picture, cells = cells_at(table, index, heads)
        batch = KeyBatch(
            keys=sorted_(keys),
            values=sorted_(values),
            queries=queries,
            places=places.long().repeat_interleave(heads, dim=0),
            valid=index >= 0,
            visual=picture >= 0,
            index=index,
            scaling=schedule.scaling,
            received=None if received is None else sorted_(received),
            picture=picture,
            cells=cells,
            outgoing=None if outgoing is None else sorted_(outgoing),
            ordinal=self.shared.places.ordinal(index, heads) if self.policy.needs_ordinals else None,
            separator=self.shared.places.separator(index, heads) if self.policy.needs_separators else None,
            layer=together.layers[0].number if len(together.layers) == 1 else -1,
            depth=self.stage.depth,
            decoding=True,
            answer=self._answer(together, heads),
            merged=None if merged is None else sorted_(merged),
        )
        return batch, order


def _in_step(groups: Iterator[LayerBatch], work: Callable[[LayerBatch], Asking]) -> None:
    """Do some work for batches of layers, as many in step as do not take too much memory."""
    shrinking, held = InStep(), 0
    for together in groups:
        if shrinking.begin(work(together)):
            # these copies are held until the host has the numbers that it asked for
            held += sum(map(size, together.layers))
        if held > BYTES:
            shrinking.finish()
            held = 0
    shrinking.finish()


def _age(schedule: Schedule, together: LayerBatch, room: Tensor) -> Asking:
    """Keep the best ``room [B, P]`` keys of every picture, by its number in the table, of every row and head."""
    schedule._observe(together)
    batch, order = schedule.stored(together, schedule._table(together))
    layers, before = len(together.layers), together.lengths
    heads = len(batch.valid) // (together.rows * layers)
    assert batch.picture is not None
    choices, fixed = [], batch.valid
    for number in (room < UNBOUNDED).any(0).nonzero()[:, 0].tolist():
        count = room[:, number].repeat_interleave(heads).repeat(layers)
        bound = to_device(count < UNBOUNDED, fixed.device)[:, None]
        mine = batch.valid & (batch.picture == number) & bound
        choices.append((mine, count.where(count < UNBOUNDED, 0)))
        fixed = fixed & ~mine
    kept = _best(schedule.policy, batch, order, schedule._table(together), choices, fixed, heads, layers)
    (lengths,) = yield [kept.sum(-1)]
    fewer = (lengths < before).any(1)
    if not bool(fewer.any()):
        return
    yield from schedule.stage.evicting(together, kept, lengths)
    for layer, rows in zip(together.layers, fewer.split(together.rows), strict=True):
        if (capacity := layer.schedule.capacity) is not None:
            layer.schedule.capacity = torch.where(rows[:, None], layer.head_lengths, capacity)


def _best(
    policy: Policy,
    batch: KeyBatch,
    order: Tensor | None,
    table: Tensor,
    choices: Sequence[tuple[Tensor, Tensor]],
    fixed: Tensor | None,
    heads: int,
    layers: int,
) -> Tensor:
    """Of each of the ``choices``, candidates ``[R, K]`` bool and their budget ``[R]``, the best, and those that are ``fixed``:
    a mask ``[R / heads, 1 or Hkv, K]`` of the slots as they are stored; ``heads`` rows of ``batch`` are a row of the cache."""
    device = batch.valid.device
    counts = [to_device(wanted, device) for _, wanted in choices]
    count = counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)
    question = question_span(table, policy.protect, device)
    if question is not None:
        question = question.repeat_interleave(heads, dim=0).repeat(layers, 1)
    scores = rank(policy, replace(batch, count=count), True, question)
    kept = per_head(scores, choices[0][0], counts[0])
    for (candidates, _), budget in zip(choices[1:], counts[1:], strict=True):
        kept = kept | per_head(scores, candidates, budget)
    kept = kept if fixed is None else kept | fixed[:, None]
    kept = kept[:, 0] if policy.shared or heads > 1 else kept
    if order is not None:
        at = order if kept.dim() == 2 else order[:, None].expand_as(kept)
        kept = torch.zeros_like(kept).scatter_(-1, at, kept)
    return kept.unflatten(0, (-1, heads)) if kept.dim() == 2 else kept


def room_of(policy: Policy, layer: QuantisedLayer) -> Tensor:
    """Number of keys that each head of a layer may hold behind its prompt, ``[B, Hkv]`` long on the CPU."""
    capacity = layer.schedule.capacity
    assert capacity is not None
    room = torch.full_like(capacity, policy.cap) if policy.cap else capacity
    if policy.beyond:
        room = room + policy.beyond
    if policy.growth:
        grown = [int(policy.growth * (layer.seen - seen)) for seen in layer.schedule.settled]
        room = room + torch.tensor(grown)[:, None]
    rows = layer.shared.places.text_rows
    return room if rows is None else room.masked_fill(rows[:, None], UNBOUNDED)


def coming_kept(policy: Policy, state: CacheState, query_spec: QuerySpec | None) -> int:
    """Number of tokens that may follow before one with which a schedule may evict or observe."""
    tokens = [UNBOUNDED]
    for layer in state.layers:
        schedule = layer.schedule
        if schedule.capacity is None:
            return 0
        if query_spec is not None:
            tokens.append(LATEST - schedule.unseen - 1)
        if not (policy.every or policy.cap):
            continue
        # room never shrinks
        free = (room_of(policy, layer) - layer.head_lengths).amin(1).tolist()
        wait = [policy.every - (layer.seen - seen) - 1 for seen in schedule.evicted]
        tokens.append(min(max(later, more, 0) for later, more in zip(wait, free, strict=True)))
    return min(tokens)


def query_spec_of(policy: Policy, heads: int) -> QuerySpec | None:
    """Queries that a policy with a schedule needs of the tokens to come, of a model with ``heads`` query heads."""
    observed = policy.observes and policy.observes_steps
    return QuerySpec(heads, observed) if observed or policy.window else None
