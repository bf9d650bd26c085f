"""Keys that stay move together: their positions become consecutive when a prompt was evicted from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kv.cache import CacheState
from ..call.forward import Prompt
from ..call.runs import Run, TextInputs
from .rotation import turn_layer


class CloseGaps(Run):
    """Gives the keys of every head positions behind each other, and what follows the positions behind these."""

    def __init__(self, prompt: Prompt, state: CacheState) -> None:
        self.prompt, self.state = prompt, state
        self._arguments = dict[str, Any]()
        self._begin = state.positions.offset

    def before_text(self, text: TextInputs) -> None:
        """Keep the arguments of the text model, which are not complete yet."""
        self._arguments = text.arguments

    def finish(self) -> None:
        """Turn the keys of all layers."""
        prompt, state, positions = self.prompt, self.state, self._arguments["position_ids"]
        places, end = prompt.phase(0).places, prompt.seen + prompt.length
        first = prompt.plan.family.first_position if self._begin is None else prompt.seen - self._begin
        first = torch.as_tensor(first, device=places.device).expand(len(places))
        at = _by_place(places.to(positions.device), positions, end)
        for layer in state.layers:
            index = layer.index.by_head.long()
            known = at.to(index.device)[:, None].expand(-1, index.shape[1], -1).gather(2, index.clamp(min=0))
            new = (index >= prompt.seen) & (known >= 0)
            # what was stored before this prompt stands where it did
            after = first.to(index.device)[:, None, None] + new.cumsum(2) - 1
            turn_layer(prompt.plan.family.text, layer, (after - known).masked_fill(~new, 0))
        stays = new[:, 0].sum(1)
        assert state.positions.offset is not None
        state.positions.offset = end - (first.to(stays.device) + stays)


def _by_place(places: Tensor, positions: Tensor, end: int) -> Tensor:
    """``[B, end]`` long: the position of every place, -1 for those that are not among ``places [B, q]``."""
    at = positions.new_full((len(places), end + 1), -1)
    return at.scatter_(1, torch.where(places < 0, end, places.long()), positions.expand(len(places), -1))[:, :end]
