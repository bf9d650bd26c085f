"""Proportional attention: each token that is left weighs as much as all tokens that it represents."""

from __future__ import annotations

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor
from torch.nn.functional import normalize, pad

from ...core.masks import leftmost
from ..call.forward import Prompt, to_device_packed
from ..call.runs import Run, TextInputs
from .tokens import by_place

#: similarities that are in memory at once
_BLOCK = 1 << 24


class WeighTokens(Run):
    """Let the tokens that are left of a prompt weigh as many as they were.

    With ``n_j`` tokens that ``j`` represents, itself among them, every layer adds ``log n_j`` to the logits of its key: were
    they all like ``j``, attention to it would be that to all of them.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def before_text(self, text: TextInputs) -> None:
        """Tell the cache the weights of the tokens that are left."""
        prompt, state, embeds = self.prompt, self.prompt.state, text.embeds
        option = prompt.plan.recipe.proportional
        before = None if state is None else state.shared.places.weights
        weights = None if option == "none" else _weights(prompt, embeds, text.planes, clips=option == "all")
        if weights is None and before is None:
            return
        if weights is None:
            weights = embeds.new_zeros(embeds.shape[:2])
        earlier = weights[:, :0] if before is None else before.to(weights.device)
        prompt.incoming.weights = torch.cat([pad(earlier, (0, prompt.seen - earlier.shape[1])), weights], dim=1)
        if state is not None:
            state.shared.places.weights = prompt.incoming.weights


def _weights(prompt: Prompt, embeds: Tensor, planes: list[Tensor], clips: bool) -> Tensor | None:
    """``[B, S]``, the logarithm of how many tokens every place represents; None where each represents itself alone.

    clips : whether those of clips count; else they represent themselves.
    """
    units, kept = prompt.layout.units("picture"), prompt.total.kept
    valid = units.valid if clips else units.valid & (units.grid[:, :1] <= 1)
    stays = valid & kept[units.row[:, None], units.places.clamp(min=0)]
    if torch.equal(stays, valid):
        return None
    width = int(stays.sum(1).max())
    with prompt.measured("selection", embeds.device), torch.no_grad():
        rows, places, valid, stays = to_device_packed(embeds.device, units.row, units.places.clamp(min=0), valid, stays)
        features = prompt.plan.family.entering(embeds, planes)[rows[:, None], places]
        sizes = represented_tokens(features, valid.bool(), stays.bool(), width)
        # a token that represents none adds nothing
        placed = by_place({"weights": sizes.clamp(min=1).log()}, units, kept.shape)["weights"]
    return placed.nan_to_num(0.0).to(embeds.dtype)


def represented_tokens(x: Tensor, valid: Tensor, kept: Tensor, width: int) -> Tensor:
    """Number of tokens that each token of ``kept [N, n]`` represents, ``[N, n]`` float32: itself, and those of the ``valid
    [N, n]`` that are not kept and more like it (cosine of ``x [N, n, D]``) than any other that is, the first on a tie.

    width : the most that are kept of a row.
    """
    unit = normalize(x.float(), dim=-1).masked_fill(~valid[..., None], 0.0)
    slots, real = leftmost(kept, width)
    kept_unit = unit.gather(1, slots[..., None].expand(-1, -1, unit.shape[-1]))
    first = first_copies(kept_unit, real)
    near = torch.empty_like(valid, dtype=torch.long)
    step = max(1, _BLOCK // max(1, len(x) * width))
    for start in range(0, x.shape[1], step):
        like = unit[:, start : start + step] @ kept_unit.transpose(1, 2)
        if first is not None:
            like = like.gather(2, first[:, None].expand_as(like))
        near[:, start : start + step] = like.masked_fill(~real[:, None], -torch.inf).argmax(-1)
    near = slots.gather(1, of_first(near, first_copies(unit, valid)))
    return kept.float().scatter_add(1, near, (valid & ~kept).float())
