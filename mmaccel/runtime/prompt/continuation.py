"""New tokens without pictures on a cache that holds a reduced prompt: all of them stay, positions follow the cache's offset."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kv.forward_info import Phase
from ...kv.positions import NextPositions
from ..call.forward import Continuation
from ..call.runs import Run, TextInputs


class ContinueText(Run):
    """Write the places and positions of the new tokens into the arguments of the text model."""

    def __init__(self, forward: Continuation) -> None:
        self.forward = forward

    def before_text(self, text: TextInputs) -> None:
        """All new tokens stay; the cache's offset moves where padding is among them."""
        forward, state, valid = self.forward, self.forward.state, text.valid
        assert state is not None
        batch, device, given = len(text.embeds), forward.device, text.arguments.get("position_ids")
        if state.positions.offset is None:
            # adopted for a prompt that was refused, or reset
            state.positions.offset = torch.full((batch,), -forward.plan.family.first_position, device=device)
        at = torch.arange(forward.seen, forward.seen + forward.length, device=device)
        if text.new_turn:
            state.positions = state.positions.next_turn()
        follows = state.positions
        offset, apart = _offset(follows, given, forward.seen, device)
        chosen = None
        if valid is None:
            places, padded = at.expand(batch, -1), False
            positions = at - offset[:, None]
        else:
            chosen = torch.arange(forward.length).expand_as(valid).masked_fill(~valid, -1)
            valid = valid.to(device, non_blocking=True)
            places, padded = at.expand_as(valid).masked_fill(~valid, -1), True
            positions = (forward.seen - offset[:, None] + valid.cumsum(1) - 1).clamp(min=0)
            assert follows.offset is not None
            follows.offset = follows.offset + (~valid).sum(1).to(follows.offset.device)
        forward.incoming.phases.append((0, Phase(places.to(torch.int32), padded, chosen)))
        if given is not None and given.dim() == 3:
            positions = positions.expand(given.shape[0], -1, -1)
            if apart is not None:
                # an axis before three is that of the text
                positions = torch.cat([positions[:-3], positions[-3:] + apart.T.to(device)[..., None]])
        text.arguments["position_ids"] = positions


def _offset(
    follows: NextPositions, given: Tensor | None, seen: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """``[B]`` long, the offset of positions behind ``seen`` tokens, and how much further each axis is, ``[B, 3]``, if they
    differ. Rows whose ``given`` positions continue behind all frames of a slow clip leave that gap behind."""
    assert follows.offset is not None
    offset, apart = follows.offset.to(device), follows.axes_ahead
    if follows.ahead is None or given is None or given.dim() != 3:
        return offset, apart
    ahead = follows.ahead.to(device)
    jumps = (given[-3:, :, 0].to(device) == seen - (offset - ahead)).all(0)
    # decided on the device: the host would wait for the answer at every step
    differs = ahead > 0 if apart is None else (ahead > 0) | (apart != 0).any(1).to(device)
    jumped = (jumps & differs).any()
    follows.offset = torch.where(jumped & jumps, offset - ahead, offset)
    # nothing in any row, once one has jumped
    follows.ahead = ahead.masked_fill(jumped, 0)
    if apart is not None:
        follows.axes_ahead = apart = apart.to(device).masked_fill(jumped, 0)
    return follows.offset, apart
