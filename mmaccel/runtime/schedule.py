"""What happens to the cache while decoding: a layer that holds more than it may loses what ranks lowest, when it is time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kv.choose import per_head, rank
from ..kv.index import to_device
from ..kv.packed import QuantisedLayer
from ..kv.shared import Shared
from ..method import KeyBatch
from .cache_stage import CacheStage
from .places import cells_at, question_span


class Schedule:
    """The options ``every``, ``cap`` and ``growth`` of a policy, see :class:`mmaccel.method.keys.CacheOptions`."""

    def __init__(self, stage: CacheStage, shared: Shared) -> None:
        self.stage, self.shared = stage, shared

    def begin(self, layer: QuantisedLayer, scaling: float) -> None:
        """A prompt is over: from here on a layer may hold what it holds now, or as much as the cap allows."""
        layer.schedule.capacity, layer.schedule.settled = layer.head_lengths, layer.seen
        if self.stage.policy.cap:
            self._shrink(layer, layer.schedule.capacity, scaling)

    def decoded(self, layer: QuantisedLayer, scaling: float) -> None:
        """Evict from a layer that holds more than it may, when it is time."""
        schedule = layer.schedule
        if schedule.capacity is None:
            schedule.capacity, schedule.settled = layer.head_lengths, layer.seen
        if layer.seen - schedule.evicted >= self.stage.policy.every:
            self._shrink(layer, schedule.capacity, scaling)

    def _shrink(self, layer: QuantisedLayer, capacity: Tensor, scaling: float) -> None:
        """Of all that a layer stores, from whichever turn, keep the best ``capacity [B, Hkv]``, or what the cap allows."""
        policy = self.stage.policy
        if policy.cap and len(layer.index) <= policy.cap:
            return
        room = torch.full_like(capacity, policy.cap) if policy.cap else capacity
        room = room + int(policy.growth * (layer.seen - layer.schedule.settled))
        if bool((layer.head_lengths <= room).all()):
            return
        table = self._table(layer)
        batch, order = self._stored(layer, table, scaling)
        among = batch.valid if policy.joint or self.stage.text_retain is not None else batch.visual & batch.valid
        fixed = batch.valid & ~among
        heads = len(batch.valid) // len(room)
        wanted = to_device((room if heads > 1 else room[:, :1]).reshape(-1), fixed.device)
        wanted = (wanted - fixed.sum(1)).clamp(min=0)
        batch = replace(batch, count=wanted)
        question = question_span(table, policy.protect, wanted.device)
        scores = rank(policy, batch, True, None if question is None else question.repeat_interleave(heads, dim=0))
        kept = per_head(scores, among, wanted) | fixed[:, None]
        kept = kept[:, 0] if policy.shared or heads > 1 else kept
        if kept.dim() == 2:
            slots = torch.zeros_like(kept).scatter_(1, order, kept)
            kept = slots.unflatten(0, (-1, heads))
        else:
            kept = torch.zeros_like(kept).scatter_(2, order[:, None].expand_as(kept), kept)
        self.stage.evict(layer, kept)

    def _table(self, layer: QuantisedLayer) -> Tensor:
        """``[B, n, 4]`` int32 (picture, t, row, column) of all places up to the end of the last prompt."""
        if self.shared.grid_table is not None:
            return self.shared.grid_table
        index = layer.index.index
        return index.new_full((len(index), 1, 4), -1)

    def _stored(self, layer: QuantisedLayer, table: Tensor, scaling: float) -> tuple[KeyBatch, Tensor]:
        """All that a layer stores, padding in front, and the slot of each key ``[rows, K]``; where heads differ every
        (row, head) is a row."""
        keys, values = layer.stored()
        schedule, index = layer.schedule, layer.index.index.long()
        queries, places, received = schedule.queries, schedule.places, schedule.received
        queries = keys.new_zeros(len(keys), keys.shape[1], 0, keys.shape[3]) if queries is None else queries
        outgoing, heads = self.stage.outgoing(layer.number, values), 1
        if index.dim() == 3:
            heads = index.shape[1]
            index, keys, values = index.flatten(0, 1), keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
            queries = queries.unflatten(1, (heads, -1)).flatten(0, 1)
            received, outgoing = (None if x is None else x.flatten(0, 1)[:, None] for x in (received, outgoing))
        # by place: packed pictures stand before text that is older
        order = index.argsort(dim=1, stable=True)
        index = index.gather(1, order)

        def sorted_(x: Tensor) -> Tensor:
            at = order[:, None].expand(x.shape[:3])
            return x.gather(2, at if x.dim() == 3 else at[..., None].expand_as(x))

        picture, cells = cells_at(table, index, heads)
        batch = KeyBatch(
            keys=sorted_(keys),
            values=sorted_(values),
            queries=queries,
            places=index[:, :0] if places is None else places.repeat_interleave(heads, dim=0),
            valid=index >= 0,
            visual=picture >= 0,
            index=index,
            scaling=scaling,
            received=None if received is None else sorted_(received),
            picture=picture,
            cells=cells,
            outgoing=None if outgoing is None else sorted_(outgoing),
            layer=layer.number,
            depth=self.stage.depth,
            decoding=True,
        )
        return batch, order
