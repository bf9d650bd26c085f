"""Eviction from a prompt that is read in pieces: after each, every layer keeps the keys of the budget of the whole prompt."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.schedule_state import ScheduleState
from ...method import LayerAttention, Policy
from ..call.forward import Forward, Piece, Prompt
from ..call.plan import PlannedStage
from ..call.runs import KeysToRead, LayerAttended
from ..call.split_prefill import SplitPrefill
from .eviction import EvictKeys


class EvictByPiece(EvictKeys):
    """Evict keys after each piece of a prompt, so that a layer holds no more than its budget, text and one piece.

    The policy scores all keys of the prompt that are left by what it has seen up to there: its window are the last queries of
    the pieces that were read, and sums over queries are carried on. A prompt of one piece is evicted from as ever.
    """

    by_piece = True

    def __init__(self, forward: Forward, stage: PlannedStage[Policy], state: CacheState, split: SplitPrefill) -> None:
        super().__init__(forward, stage, state)
        self.split = split
        split.evicts = True
        #: of every layer how many keys that compete its heads hold, ``[B]`` long on the CPU
        self._held: dict[int, Tensor] = {}
        #: of the piece that is read: its tokens that are text, ``[B, n]`` bool, and their number, by device
        self._text: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def carries(self) -> bool:
        """Whether queries and figures of this part of a prompt are needed for later parts."""
        return bool(self.split.pieces)

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """Nothing for a piece; see :meth:`.eviction.EvictKeys.keys_to_read`."""
        return None if self.carries else super().keys_to_read(layer)

    def released(self, number: int) -> list[int]:
        """Layers from which nothing is evicted any more in this forward, since the attention of layer ``number`` has run."""
        return [number] if self.carries and not self.shrinks else super().released(number)

    def after_attention(self, layer: LayerAttended) -> None:
        """Let the policy see the queries of a piece, and evict from the layer what exceeds its budget."""
        if not self.carries:
            super().after_attention(layer)
            return
        prompt, number, device = self.forward, layer.number, layer.query.device
        piece = self.split.now
        assert isinstance(prompt, Prompt) and piece is not None
        with prompt.measured("selection", device):
            text = self._texts(piece, device)
            places = to_device(torch.where(piece.chosen < 0, -1, piece.chosen + prompt.seen), device)
            attention = LayerAttention(layer.query, layer.key, layer.visible, layer.scaling, text, places=places)
            self._observe(number, attention, places, layer.window)
            self._evict(number, piece, device)
        if piece.last:
            self._end(number)

    def finish(self) -> None:
        """Add the keys to the statistics; nothing of the pieces is carried on, unless a schedule does."""
        if self.carries and not self.policy.scheduled:
            for layer in self.state.layers:
                layer.schedule = ScheduleState()
        super().finish()

    def _texts(self, piece: Piece, device: torch.device) -> Tensor:
        if (piece.begin, device) not in self._text:
            assert isinstance(self.forward, Prompt)
            _, text = self.forward.kinds(piece.chosen)
            self._text = {(piece.begin, device): to_device(text, device)}
        return self._text[piece.begin, device]

    @cached_property
    def _rows(self) -> Tensor:
        """``[B]`` bool on the CPU, rows with a picture."""
        assert self.prompt is not None
        return self.prompt.tokens.pictured_rows

    def _rivals(self, chosen: Tensor) -> Tensor:
        """``[B]`` long on the CPU: how many of the tokens at ``chosen [B, n]`` compete for the budget."""
        assert isinstance(self.forward, Prompt)
        visual, text = self.forward.kinds(chosen)
        return ((visual | text) & self._rows[:, None] if self.policy.joint else visual).sum(1)

    def _evict(self, number: int, piece: Piece, device: torch.device) -> None:
        assert self.prompt is not None
        count = torch.tensor(self.prompt.tokens.layer_budgets()[number])
        rivals = self._rivals(piece.chosen)
        rivals = rivals + self._held.get(number, torch.zeros_like(rivals))
        self._held[number] = torch.minimum(rivals, count)
        if bool((rivals > count).any()):
            table = to_device(self.prompt.tokens.table, device)
            layer = self.state.layers[number]
            self.schedule.cut(layer, table, self._rows, self.forward.seen, count, rivals)

    def _end(self, number: int) -> None:
        """Note what is left of a layer whose prompt was read to its end."""
        prompt, forward = self.prompt, self.forward
        assert prompt is not None
        rivals, left = self._rivals(torch.cat([piece.chosen for piece in self.split.pieces], 1)), self._held[number]
        budget = torch.tensor(prompt.tokens.layer_budgets()[number])
        resolved = int(torch.minimum(budget, rivals).sum()) if self.stage.retain is not None else int(rivals.sum())
        prompt.evictor.note(int(rivals.sum()), resolved, float(left.sum()))
        if not self.policy.joint:
            prompt.evictor.pictured[number] = left[:, None]
        if self.policy.scheduled:
            rows = None if prompt.tokens.text_rows is None else self._rows
            self.schedule.begin(self.state.layers[number], rows, forward.length - forward.phase(number).lengths)
