"""The prompt in front of the text model, in three steps.

1. *Reduce*: the methods between the towers and the language model choose and merge visual tokens.
2. *Positions*: the tokens that are left keep theirs, and decoding continues behind the unreduced prompt.
3. *DeepStack*: features that the first layers add go to the places of the tokens that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.layout import Modality
from ...families import Family
from ...kv.positions import NextPositions
from ..call.call import Call
from ..call.forward import Prompt, rows_at, to_device_packed
from ..call.plan import ModelPlan
from ..call.runs import Run, TextInputs
from ..call.vision_output import VisionOutput
from ..tower import frame_merging, patch_pruning, token_groups
from .tokens import TokenReducer

#: figures per token ``[B, S]`` that a method is shown beside the tokens, made before it works
LookFirst = Callable[[Call[ModelPlan], Prompt, TextInputs], Mapping[str, Tensor]]


@dataclass(frozen=True)
class CompactedPrompt:
    """The tokens that are left of a prompt, on the device of the embeddings; left-padded to ``q``.

    at : ``[B, q]`` long, their places in the prompt; 0 for padding.
    rank : ``[B, q]`` long, counted from 0; -1 for padding.
    valid : ``[B, S]`` bool, places of the prompt that are no padding.
    last : ``[B, 1]`` long, the last of them.
    visual, spots : ``[B, q]`` bool on the CPU and ``[n]`` long, those of the tokens that are visual, and their slots counted
        over all rows.
    """

    at: Tensor
    rank: Tensor
    valid: Tensor
    last: Tensor
    visual: Tensor
    spots: Tensor


class ReducePrompt(Run):
    """The stages before the language model: choose and merge visual tokens.

    look_first : by number of the stage, figures that its method is shown beside the tokens.
    """

    changes_cache = False
    runs_model = True

    def __init__(
        self, call: Call[ModelPlan], prompt: Prompt, reducer: TokenReducer, look_first: Mapping[int, LookFirst]
    ) -> None:
        self.call, self.prompt, self.reducer, self.look_first = call, prompt, reducer, look_first

    def before_text(self, text: TextInputs) -> None:
        """Leave embeddings and DeepStack features in full length, reduced slots holding their merged values."""
        prompt, plan = self.prompt, self.prompt.plan
        text.planes = deep_planes(plan.family, text)
        works = plan.patches or plan.encoder or plan.frame_merging or plan.projector
        with prompt.measured("selection", text.embeds.device) if works else nullcontext():
            text.embeds, text.planes = take_from_towers(prompt, self.call.vision.outputs, text.embeds, text.planes)
            for stage in plan.projector:
                look = self.look_first.get(stage.number)
                looked = None if look is None else look(self.call, prompt, text)
                reduction = self.reducer.reduce(stage, plan.family.entering(text.embeds, text.planes), None, looked)
                text.substitute(reduction)
        if prompt.state is not None:
            prompt.first_time = prompt.state.shared.places.note_pictures(prompt.layout.visual, prompt.seen)


def take_from_towers(
    prompt: Prompt, outputs: Mapping[Modality, VisionOutput], embeds: Tensor, planes: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Keep the tokens that methods inside the towers have left; returns ``embeds [B, S, D]`` and DeepStack features ``planes``,
    each of the same shape, in full length, reduced slots holding their merged values."""
    plan = prompt.plan
    if plan.patches is not None:
        patch_pruning.leave_out(prompt, plan.patches, outputs)
    if plan.frame_merging is not None:
        frame_merging.leave_out(prompt, plan.frame_merging, outputs)
    groups = token_groups.settle(plan, prompt.stats, prompt.layout, outputs, embeds)
    if plan.encoder is None or groups is None:
        return embeds, planes
    # the tokens hold their merged values already; DeepStack features were taken while groups were smaller
    merged, rest = groups
    planes = [merged.substitute(plane) for plane in planes]
    if rest is not None:
        merged = merged.then(rest)
        embeds, *planes = (rest.substitute(x) for x in (embeds, *planes))
    prompt.reduced(plan.encoder.number, 0, merged.keeping(prompt.layout.valid & ~prompt.layout.visual))
    return embeds, planes


class WritePrompt(Run):
    """Write the tokens that are left into the arguments of the text model, residuals added: tokens are compared by what they
    showed.

    cut : cuts them into chunks, where lower layers read a prompt in chunks.
    """

    def __init__(
        self, prompt: Prompt, reducer: TokenReducer, cut: Callable[[Tensor, TextInputs], Tensor] | None
    ) -> None:
        self.prompt, self.reducer, self.cut = prompt, reducer, cut

    def before_text(self, text: TextInputs) -> None:
        """Gather the tokens that are left, compute positions, lay out DeepStack features."""
        prompt, arguments, planes = self.prompt, text.arguments, text.planes
        embeds, residuals = text.embeds, self.reducer.residuals
        while residuals:
            # as large as the embeddings, and not needed while decoding
            embeds = residuals.pop(0).add(embeds)
        chosen, padded = prompt.compacted(prompt.total.kept)
        left = _left(prompt, chosen, embeds.device)
        # where every token stays the caller's embeddings need no copy
        whole = chosen.shape[1] == prompt.length and not padded
        text.embeds = embeds if whole else rows_at(embeds, left.at)
        arguments["position_ids"] = _positions(prompt, left, arguments.get("position_ids"), embeds.device)
        arguments |= prompt.plan.family.of_tokens(arguments, lambda x: x.gather(1, left.at.to(x.device)))
        if planes:
            visual = left.visual.to(embeds.device, non_blocking=True)
            features = [rows_at(plane, left.at).flatten(0, 1)[left.spots] for plane in planes]
            arguments |= prompt.plan.family.deep_arguments(visual, features)
        prompt.stats.layer_tokens = [int(left.visual.sum())] * prompt.plan.family.depth
        prompt.stats.sounds_dropped += int((prompt.layout.heard & ~prompt.total.kept).sum())
        if self.cut is not None:
            chosen = self.cut(chosen, text)
            padded = bool((chosen < 0).any())
        prompt.begin(0, chosen, padded, embeds.device)


def _left(prompt: Prompt, chosen: Tensor, device: torch.device) -> CompactedPrompt:
    """The tokens at the places ``chosen [B, q]`` on the CPU, -1 for padding."""
    real, (visual, _) = prompt.layout.valid, prompt.kinds(chosen)
    last = (real * torch.arange(prompt.length)).argmax(1, keepdim=True)
    rank, spots = (chosen >= 0).cumsum(1) - 1, visual.flatten().nonzero()[:, 0]
    at, rank, valid, last, spots = to_device_packed(device, chosen.clamp(min=0), rank, real, last, spots)
    return CompactedPrompt(at, rank, valid.bool(), last, visual, spots)


def _positions(prompt: Prompt, left: CompactedPrompt, given: Tensor | None, device: torch.device) -> Tensor:
    """Position ids of the tokens that are left, ``[B, q]`` or ``[axes, B, q]``; tells the cache the position of the next token.

    Let ``P[a, s]`` be the position of place ``s`` on axis ``a`` (time, height and width with M-RoPE, else one axis), ``s*`` the
    last place of a row and ``n`` the tokens the cache has seen. Then, as transformers counts,

        furthest = 1 + max P[a, s]              over all axes and places
        after[a] = 1 + P[a, s*]                 the same on all axes if ``s*`` is text
        offset   = n - after[0]                 the token behind ``n`` others has position ``n - offset`` on the first axis
        ahead    = furthest - after[0]          > 0 where frames of a slow clip are later than the text behind them, and where
                                                a prompt ends in a picture
        axes_ahead[a] = after[a] - after[0]     not 0 only where a prompt ends in a picture
    """
    state, plan = prompt.state, prompt.plan
    positions = _given(prompt, left, given, device)
    axes = positions[-3:] if positions.dim() == 3 else positions[None]
    furthest = axes.amax(0).masked_fill(~left.valid, -1).amax(1) + 1
    ends = axes.expand(-1, *left.valid.shape).gather(2, left.last.expand(len(axes), -1, -1))[..., 0] + 1
    after, apart = ends[0], (ends - ends[0]).T
    ahead: Tensor | None = furthest - after
    kept = positions[..., torch.arange(len(left.at), device=device)[:, None], left.at]
    if plan.recipe.positions == "paper" and (plan.encoder is not None or plan.projector):
        # what enters the language model is numbered through
        offset = None if state is None else state.positions.offset
        first = plan.family.first_position if offset is None else (prompt.seen - offset.to(device))[:, None]
        kept = (left.rank + first).clamp(min=0)
        after, ahead = kept.amax(1) + 1, None
        if positions.dim() == 3:
            kept = kept.expand(positions.shape[0], -1, -1)
    if state is not None:
        state.positions = follows = NextPositions(prompt.seen + prompt.length - after)
        if ahead is not None and positions.dim() == 3:
            # asked once here, so that most calls need not look at it while they decode
            later, differ = torch.stack([(ahead > 0).any(), apart.any()]).tolist()
            follows.ahead = ahead if later or differ else None
            follows.axes_ahead = apart if differ else None
        for layer in plan.stage_at_layer:
            state.shared.split(plan.family.stored_from(layer))
    return kept


def positions_everywhere(prompt: Prompt, given: Tensor | None, device: torch.device) -> Tensor:
    """Position ids of all places, ``[B, S]`` or ``[axes, B, S]``."""
    every, padded = prompt.compacted(prompt.layout.valid)
    return _given(prompt, _left(prompt, every, device), given, device)


def _given(prompt: Prompt, left: CompactedPrompt, positions: Tensor | None, device: torch.device) -> Tensor:
    """The caller's position ids for the whole prompt, ``[1 or axes, B, S]`` or ``[B, S]``; where there are none, those that
    follow the cache."""
    batch, offset = len(left.at), None if prompt.state is None else prompt.state.positions.offset
    if positions is None:
        positions = torch.arange(prompt.seen, prompt.seen + prompt.length, device=device).expand(batch, -1)
        if offset is not None:
            # the cache may have seen padding, or forgotten places
            follows = prompt.seen - offset.to(device)
            positions = (follows[:, None] + left.valid.cumsum(1) - 1).clamp(min=0)
    positions = positions.to(device)
    if positions.shape[-2] == 1 and batch > 1:
        positions = positions.expand(*positions.shape[:-2], batch, -1)
    if positions.dim() == 2 and prompt.seen and offset is not None:
        # ``generate`` counts tokens, and where chunks have joined positions go on before that
        first = positions.gather(1, left.valid.long().argmax(1, keepdim=True))
        positions = (positions - first + prompt.seen - offset.to(device)[:, None]).clamp(min=0)
    return positions


def deep_planes(family: Family, text: TextInputs) -> list[Tensor]:
    """DeepStack features of a prompt that is not reduced yet, laid out over the sequence, ``[B, S, D]`` each."""
    planes: list[Tensor] = []
    if (deepstack := family.deep_features(text.arguments)) is None:
        return planes
    mask, each = deepstack
    for features in each:
        plane = features.new_zeros(*mask.shape, features.shape[-1])
        planes.append(plane.masked_scatter(mask[..., None].to(plane.device), features))
    return planes
