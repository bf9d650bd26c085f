"""What happens to a prompt with pictures on its way into the text model, in three steps.

1. *Reduce*: the methods between the towers and the language model choose and merge visual tokens.
2. *Positions*: the tokens that are left keep theirs, and decoding goes on behind the unreduced prompt.
3. *DeepStack*: features that the first layers add go to the places of the tokens that are left.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...method import DraftMethod, PreviewMethod
from ..call.call import Scope
from ..call.forward import Prompt, StageResult, rows_at, sent
from ..call.plan import ModelPlan
from ..layers import chunked_prefill as chunks
from ..tower import patch_pruning as patches
from ..tower import token_groups as encoder_groups
from ..tower.taps import Taps
from . import draft, tokens
from .lookahead import first_pass

#: features ``[B, S, D]`` that layers of the language model add, laid out over the sequence
Planes = list[Tensor]


@dataclass(frozen=True)
class Left:
    """The tokens of a prompt that are left, on the device of the embeddings; left-padded to ``q``.

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


def reduce(prompt: Prompt, taps: Taps, kwargs: dict[str, Any], scope: Scope[ModelPlan]) -> tuple[Tensor, Planes]:
    """Run every stage before the language model: the embeddings ``[B, S, D]`` and DeepStack features in full length, kept slots
    holding their merged values."""
    embeds, plan = kwargs["inputs_embeds"], prompt.plan
    deepstack = plan.family.deep_features(kwargs)
    planes = _planes(*deepstack) if deepstack is not None else []
    works = plan.patches is not None or plan.encoder is not None or plan.projector
    with prompt.measured("selection", embeds.device) if works else nullcontext():
        if plan.patches is not None:
            patches.leave_out(prompt, plan.patches)
        found = encoder_groups.settle(plan, prompt.stats, prompt.layout, prompt.encoded, embeds)
        if plan.encoder is not None and found is not None:
            # the tokens hold their merged values already; DeepStack features were taken while groups were smaller
            merged, rest = found
            planes = [merged.substitute(plane) for plane in planes]
            if rest is not None:
                merged, embeds = merged.then(rest), rest.substitute(embeds)
                planes = [rest.substitute(plane) for plane in planes]
            prompt.total = merged.keeping(prompt.layout.valid & ~prompt.layout.visual)
            prompt.history.append(StageResult(plan.encoder.number, 0, prompt.total))
        for stage in plan.projector:
            if isinstance(stage.method, PreviewMethod):
                positions = _everywhere(prompt, kwargs.get("position_ids"), embeds.device)
                prompt.looked = first_pass(scope, prompt, stage.method, embeds, planes, positions)
            if isinstance(stage.method, DraftMethod):
                seen = draft.read(scope, stage.method, plan.drafts[stage.number], len(embeds), prompt.length)
                prompt.looked = {"draft_match": seen.to(embeds.device)}
            made = tokens.reduce(prompt, stage, taps, plan.family.entering(embeds, planes), None)
            embeds = made.substitute(embeds)
            planes = [made.substitute(plane) for plane in planes]
    return embeds, planes


def write(prompt: Prompt, embeds: Tensor, planes: Planes, kwargs: dict[str, Any]) -> None:
    """Put what is left of the prompt into the arguments of the text model, residuals added: what tokens are compared by is what
    they showed."""
    while prompt.residuals:
        # as large as what they are added to, and not needed while decoding
        embeds = prompt.residuals.pop(0).add(embeds)
    chosen, padded = prompt.compacted(prompt.total.kept)
    left = _left(prompt, chosen, embeds.device)
    # where every token stays the caller's embeddings need no copy
    whole = chosen.shape[1] == prompt.length and not padded
    kwargs["inputs_embeds"] = embeds if whole else rows_at(embeds, left.at)
    kwargs["position_ids"] = _positions(prompt, left, kwargs.get("position_ids"), embeds.device)
    if planes:
        visual = left.visual.to(embeds.device, non_blocking=True)
        features = [rows_at(plane, left.at).flatten(0, 1)[left.spots] for plane in planes]
        kwargs |= prompt.plan.family.deep_arguments(visual, features)
    prompt.stats.layer_tokens = [int(left.visual.sum())] * prompt.plan.family.depth
    if prompt.plan.chunks is not None:
        chosen = chunks.cut(prompt, chosen, planes, kwargs)
        padded = bool((chosen < 0).any())
    prompt.begin(0, chosen, padded, embeds.device)


def _left(prompt: Prompt, chosen: Tensor, device: torch.device) -> Left:
    """Of the places ``chosen [B, q]`` on the CPU, -1 for padding."""
    visual, real = prompt.layout.visual, prompt.layout.valid
    at = chosen.clamp(min=0)
    stays = visual.gather(1, at) & (chosen >= 0)
    last = (real * torch.arange(prompt.length)).argmax(1, keepdim=True)
    at, rank, valid, last, spots = sent(
        device,
        at,
        (chosen >= 0).cumsum(1) - 1,
        real,
        last,
        stays.flatten().nonzero()[:, 0],
    )
    return Left(at, rank, valid.bool(), last, stays, spots)


def _positions(prompt: Prompt, left: Left, given: Tensor | None, device: torch.device) -> Tensor:
    """Position ids of the tokens that are left, ``[B, q]`` or ``[axes, B, q]``; tells the cache where the next token stands.

    Let ``P[a, s]`` be the position of place ``s`` on axis ``a`` (time, height and width with M-RoPE, else one axis), ``s*`` the
    last place of a row and ``n`` the tokens the cache has seen. Then, as transformers counts,

        furthest = 1 + max P[a, s]              over all axes and places
        after[a] = 1 + P[a, s*]                 the same on all axes if ``s*`` is text
        offset   = n - after[0]                 the token that follows ``n`` others stands at ``n - offset`` on the first axis
        ahead    = furthest - after[0]          > 0 where frames of a slow clip stand later than the text behind them, and where
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
        start = state.offset.to(device) if state is not None and state.offset is not None else None
        first = plan.family.first_position
        kept = (left.rank + first if start is None else left.rank + (prompt.seen - start)[:, None]).clamp(min=0)
        after, ahead = kept.amax(1) + 1, None
        if positions.dim() == 3:
            kept = kept.expand(positions.shape[0], -1, -1)
    if state is not None:
        state.offset, state.ahead, state.shared.axes_ahead = prompt.seen + prompt.length - after, None, None
        if ahead is not None and positions.dim() == 3:
            # asked once here, so that most calls need not look at it while they decode
            later, differ = torch.stack([(ahead > 0).any(), apart.any()]).tolist()
            state.ahead = ahead if later or differ else None
            state.shared.axes_ahead = apart if differ else None
        for layer in plan.stage_at_layer:
            state.shared.split(plan.family.stored_from(layer))
    return kept


def _everywhere(prompt: Prompt, given: Tensor | None, device: torch.device) -> Tensor:
    """Position ids of all places, ``[B, S]`` or ``[axes, B, S]``."""
    every, padded = prompt.compacted(prompt.layout.valid)
    return _given(prompt, _left(prompt, every, device), given, device)


def _given(prompt: Prompt, left: Left, positions: Tensor | None, device: torch.device) -> Tensor:
    """The caller's position ids for the whole prompt, ``[1 or axes, B, S]`` or ``[B, S]``; where there are none, those that
    follow the cache."""
    batch, state = len(left.at), prompt.state
    if positions is None:
        positions = torch.arange(prompt.seen, prompt.seen + prompt.length, device=device).expand(batch, -1)
        if state is not None and state.offset is not None:
            # the cache may have seen padding, or forgotten places
            follows = prompt.seen - state.offset.to(device)
            positions = (follows[:, None] + left.valid.cumsum(1) - 1).clamp(min=0)
    positions = positions.to(device)
    if positions.shape[-2] == 1 and batch > 1:
        positions = positions.expand(*positions.shape[:-2], batch, -1)
    if positions.dim() == 2 and prompt.seen and state is not None and state.offset is not None:
        # ``generate`` counts tokens, and where chunks have joined positions go on before that
        first = positions.gather(1, left.valid.long().argmax(1, keepdim=True))
        positions = (positions - first + prompt.seen - state.offset.to(device)[:, None]).clamp(min=0)
    return positions


def _planes(mask: Tensor, deepstack: list[Tensor]) -> Planes:
    """DeepStack features ``[visual tokens, D]`` laid out over the sequence, ``[B, S, D]``."""
    planes = []
    for features in deepstack:
        plane = features.new_zeros(*mask.shape, features.shape[-1])
        planes.append(plane.masked_scatter(mask[..., None].to(plane.device), features))
    return planes
