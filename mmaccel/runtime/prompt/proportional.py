"""Proportional attention: each token that is left weighs as much as all tokens that it represents."""

from __future__ import annotations

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor
from torch.nn.functional import normalize, pad

from ...core.masks import leftmost
from ...recipe import Proportional
from ..call.forward import Prompt, to_device_packed
from ..call.runs import Run, TextInputs
from .tokens import by_place

#: similarities that are in memory at once
_BLOCK = 1 << 24


class WeighTokens(Run):
    """Let the tokens that are left of a prompt weigh as many as they were.

    With ``n_j`` tokens that ``j`` represents, itself among them, every layer adds ``log n_j`` to the logits of its key: were
    they all like ``j``, attention to it would be that to all of them.

    With ``"restore"`` tokens that merged count for the one they merged into, whatever it is like. In layer 0 each of the ``n``
    tokens that are left of a picture of ``N`` adds ``log (N / n)``. In this forward a factor of distance is added to the logits
    of all pairs.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def before_text(self, text: TextInputs) -> None:
        """Tell the cache the weights of the tokens that are left."""
        prompt, state, embeds = self.prompt, self.prompt.state, text.embeds
        option = prompt.plan.recipe.proportional
        before = None if state is None else state.shared.places.weights
        first_before = None if state is None else state.shared.places.first_weights
        made = None if option == "none" else _weights(prompt, embeds, text.planes, option)
        if made is None and before is None:
            return
        weights, first = made or (embeds.new_zeros(embeds.shape[:2]), None)
        if first is None and first_before is not None:
            first = weights
        if first is not None:
            prompt.incoming.first_weights = self._behind(before if first_before is None else first_before, first)
        prompt.incoming.weights = self._behind(before, weights)
        prompt.incoming.by_distance = option == "restore" and made is not None
        if state is not None:
            state.shared.places.weights = prompt.incoming.weights
            state.shared.places.first_weights = prompt.incoming.first_weights

    def _behind(self, earlier: Tensor | None, weights: Tensor) -> Tensor:
        """``weights [B, S]`` behind those of the places before."""
        earlier = weights[:, :0] if earlier is None else earlier.to(weights.device)
        return torch.cat([pad(earlier, (0, self.prompt.seen - earlier.shape[1])), weights], dim=1)


def _weights(
    prompt: Prompt, embeds: Tensor, planes: list[Tensor], option: Proportional
) -> tuple[Tensor, Tensor | None] | None:
    """``[B, S]``, the logarithm of how many tokens every place represents, and with ``"restore"`` that of layer 0; None where
    each represents itself alone."""
    clips, restore = option != "pictures", option == "restore"
    units, kept = prompt.layout.units("picture"), prompt.total.kept
    valid = units.valid if clips else units.valid & (units.grid[:, :1] <= 1)
    stays = valid & kept[units.row[:, None], units.places.clamp(min=0)]
    if torch.equal(stays, valid):
        return None
    width = int(stays.sum(1).max())
    # tokens that are left, or went nowhere, are counted by what they are like
    counted, merged = valid, torch.zeros(kept.shape)
    if restore:
        owner = prompt.total.owner()
        goes = (owner >= 0) & ~kept & prompt.layout.visual
        merged.scatter_add_(1, owner.clamp(min=0), goes.float())
        counted = valid & ~goes[units.row[:, None], units.places.clamp(min=0)]
    share = torch.where(stays, (valid.sum(1) / stays.sum(1).clamp(min=1))[:, None], 1.0)
    with prompt.measured("selection", embeds.device), torch.no_grad():
        given = units.row, units.places.clamp(min=0), counted, stays
        rows, places, counted, stays = to_device_packed(embeds.device, *given)
        features = prompt.plan.family.entering(embeds, planes)[rows[:, None], places]
        sizes = represented_tokens(features, counted.bool(), stays.bool(), width)
        figures = by_place({"sizes": sizes, "share": share.to(sizes)}, units, kept.shape)
        # a token that represents none adds nothing
        weights = (figures["sizes"].nan_to_num(1.0) + merged.to(sizes.device)).clamp(min=1).log()
        first = figures["share"].nan_to_num(1.0).log().to(embeds.dtype) if restore else None
    return weights.to(embeds.dtype), first


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
