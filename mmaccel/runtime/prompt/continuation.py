"""New tokens without pictures on a cache that holds a reduced prompt: all of them stay, positions follow the cache's offset."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kv.cache import CacheState
from ...kv.forward_info import Phase
from ..call.forward import Continuation
from ..call.runs import Run, TextInputs


class ContinueText(Run):
    """Write the places and positions of the new tokens into the arguments of the text model."""

    def __init__(self, forward: Continuation) -> None:
        self.forward = forward

    def before_text(self, text: TextInputs) -> None:
        """All new tokens stay; the cache's offset moves where padding is among them."""
        forward, state, arguments = self.forward, self.forward.state, text.arguments
        assert state is not None
        _place(forward, state, text.valid, arguments, text.new_turn)


def _place(
    forward: Continuation, state: CacheState, valid: Tensor | None, kwargs: dict[str, Any], new_turn: bool
) -> None:
    """For ``valid`` and ``new_turn`` see :class:`~mmaccel.runtime.call.runs.TextInputs`."""
    batch, device, given = len(kwargs["inputs_embeds"]), forward.device, kwargs.get("position_ids")
    if state.offset is None:
        # adopted for a prompt that was refused, or reset
        state.offset = torch.full((batch,), -forward.plan.family.first_position, device=device)
    at = torch.arange(forward.seen, forward.seen + forward.length, device=device)
    if new_turn and state.shared.axes_ahead is not None:
        (state.offset, state.ahead), state.shared.axes_ahead = state.shared.behind_pictures(), None
    assert state.offset is not None
    offset, apart = state.offset.to(device), state.shared.axes_ahead
    if state.ahead is not None and given is not None and given.dim() == 3:
        ahead = state.ahead.to(device)
        jumps = (given[-3:, :, 0].to(device) == forward.seen - (offset - ahead)).all(0)
        # decided on the device: the host would wait for the answer at every step
        differs = ahead > 0 if apart is None else (ahead > 0) | (apart != 0).any(1).to(device)
        jumped = (jumps & differs).any()
        state.offset = offset = torch.where(jumped & jumps, offset - ahead, offset)
        # nothing in any row, once one has jumped
        state.ahead = ahead.masked_fill(jumped, 0)
        if apart is not None:
            state.shared.axes_ahead = apart = apart.to(device).masked_fill(jumped, 0)
    offset, chosen = offset[:, None], None
    if valid is None:
        places, padded = at.expand(batch, -1), False
        positions = at - offset
    else:
        chosen = torch.arange(forward.length).expand_as(valid).masked_fill(~valid, -1)
        valid = valid.to(device, non_blocking=True)
        places, padded = at.expand_as(valid).masked_fill(~valid, -1), True
        positions = (forward.seen - offset + valid.cumsum(1) - 1).clamp(min=0)
        state.offset = state.offset + (~valid).sum(1).to(state.offset.device)
    forward.incoming.phases.append((0, Phase(places.to(torch.int32), padded, chosen)))
    if given is not None and given.dim() == 3:
        positions = positions.expand(given.shape[0], -1, -1)
        if apart is not None:
            # an axis before three is that of the text
            positions = torch.cat([positions[:-3], positions[-3:] + apart.T.to(device)[..., None]])
    kwargs["position_ids"] = positions
