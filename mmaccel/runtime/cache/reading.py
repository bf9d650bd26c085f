"""Policies that store all keys, and choose at every decode step which visual keys the upper layers read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kv.cache import CacheState
from ...method import LayerAttention, ReadingPolicy
from ..call.call import Call
from ..call.forward import Forward
from ..call.plan import ModelPlan, PlannedStage
from ..call.runs import KeysToRead, LayerAttended
from ..prompt.lookahead import own_query
from .eviction import CachePolicy
from .sparse_read import first_layer, note_read, packed_read, prepare_reads, read_layer, sparse_read


class RecallKeys(CachePolicy):
    """The attention of one layer chooses the keys that all layers above it read in the same step."""

    reads_keys = True

    def after_attention(self, layer: LayerAttended) -> None:
        """Note the keys of a prompt; at a decode step choose the keys that the layers above read."""
        if self.prompt is not None:
            self.prompt.note(layer.number, layer.query.device)
            return
        first, query = first_layer(self.policy, self.depth), layer.query
        if layer.number == first - 1 and query.shape[2] == 1:
            text = torch.ones(len(query), 1, dtype=torch.bool, device=query.device)
            attention = LayerAttention(query, layer.key, layer.visible, layer.scaling, text)
            read = sparse_read(self.policy, self.state.shared, self.state.layers[layer.number], attention)
            self.forward.incoming.reads.append((first, read))


class ReadKeys(CachePolicy):
    """Every layer chooses the keys that it reads, by its own query, before it attends."""

    def __init__(self, forward: Forward, stage: PlannedStage[ReadingPolicy], state: CacheState) -> None:
        super().__init__(forward, stage, state)
        self.reading = stage.method
        self.reads_keys = not stage.method.summarises
        self.last_queries = 0 if self.prompt is None else self.policy.window or self.reading.noted
        self._scaling = 1.0
        #: the last queries of each layer of a prompt ``[B, Hq, W, D]``, and which are tokens ``[B, W]`` bool
        self._queries: dict[int, tuple[Tensor, Tensor]] = {}

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """The keys that a layer reads in a decode step; packed ones are decoded only if they are needed."""
        if self.prompt is not None or layer.query.shape[2] > 1:
            return None
        if layer.number < first_layer(self.reading, self.depth):
            return None
        held, key = self.state.layers[layer.number], None if layer.as_stored else layer.key
        chosen = read_layer(self.reading, held, self.asking(layer), key, layer.scaling)
        if chosen is None:
            return None
        if layer.number in self.forward.incoming.where_parked:
            note_read(held, chosen, self.reading.summarises)
        pages = packed_read(held, chosen) if layer.as_stored and layer.visible is None else None
        return KeysToRead(chosen, pages)

    def asking(self, layer: LayerAttended) -> Tensor:
        """``[B, Hq, 1, D]``: the queries by which a layer chooses."""
        return layer.query

    def after_attention(self, layer: LayerAttended) -> None:
        """Note the keys of a prompt, and its last queries."""
        if self.prompt is None:
            return
        self.prompt.note(layer.number, layer.query.device)
        self._scaling = layer.scaling
        if window := self.last_queries:
            places = self.prompt.tokens.of_layer(layer.number, layer.query.device).places[:, -window:]
            self._queries[layer.number] = layer.query[:, :, -window:].clone(), places >= 0

    @property
    def pieces(self) -> int:
        """Number of pieces in which the prompt was read."""
        return 1

    def finish(self) -> None:
        """Prepare, behind a prompt, the choices of its layers in the steps that follow."""
        if self.prompt is not None:
            layers = self.state.layers[first_layer(self.reading, self.depth) :]
            with self.forward.measured("selection", self.forward.phase(0).places.device):
                prepare_reads(self.reading, layers, self._scaling, self._queries, self.prompt.tokens.text_rows)
            self._queries = {}
            if self.reading.by_piece and self.pieces == 1:
                self.forward.stats.notes.append(
                    f"prefill of {self.reading.name} chose nothing: the text model read the {self.forward.length} tokens of "
                    "the prompt at once; give a smaller chunk, such as chunk=512"
                )
        super().finish()


class ReadKeysAhead(ReadKeys):
    """Every layer chooses the keys that it reads by the query that it would have if its input were that of the layer before
    it."""

    def __init__(
        self, call: Call[ModelPlan], forward: Forward, stage: PlannedStage[ReadingPolicy], state: CacheState
    ) -> None:
        super().__init__(forward, stage, state)
        self.call = call
        self._now: Tensor | None = None
        self._next: Tensor | None = None

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Compute the query by which the next layer chooses."""
        self._now, self._next = self._next, None
        family, above = self.forward.plan.family, number + 1
        if self.prompt is None and hidden.shape[1] == 1 and above in family.attending:
            # layers that turn their keys otherwise are given other angles
            if family.rope_kind(number) == family.rope_kind(above):
                self._next = own_query(self.call, above, family.text.layers[above], hidden, arguments)
        return hidden

    def asking(self, layer: LayerAttended) -> Tensor:
        """``[B, Hq, 1, D]``: the query that the layer before promised; its own where that has another RoPE."""
        return layer.query if self._now is None else self._now.to(layer.query)
