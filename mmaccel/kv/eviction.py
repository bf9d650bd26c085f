"""Eviction at the end of prefill: a policy scores the keys of the prompt, the best visual ones stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..budget import Retain, resolve
from ..errors import MmaccelError
from ..method import KeyBatch, Policy
from ..reduction import top_mask

if TYPE_CHECKING:
    from ..door import Step


def evict(step: Step, number: int, query: Tensor, scaling: float) -> Tensor:
    """Let the recipe's policy evict from layer ``number`` what this forward has just stored.

    Keys from earlier turns stay. Padding goes first; visual keys are cut to their budget per KV head; text keys stay unless
    the recipe has a text budget.

    Parameters
    ----------
    query : ``[B, Hq, q, D]``, this forward's queries.

    Returns
    -------
    ``[3]`` float: visual keys of this forward there were, resolved, and kept, summed over rows, mean over heads.
    """
    state, layout, owner = step.state, step.layout, step.owner
    assert state is not None and layout is not None and owner.policy is not None
    stage, policy = owner.built[owner.policy]
    assert isinstance(policy, Policy) and stage.retain is not None
    layer, places = state.layers[number], step.phase(number).places.to(query.device).long()
    keys, values = layer.stored()
    new = places.shape[1]
    valid = places >= 0
    local = torch.where(valid, places - step.seen, 0)
    visual = layout.visual.to(query.device).gather(1, local) & valid
    batch = KeyBatch(
        keys=keys[:, :, -new:],
        values=values[:, :, -new:],
        queries=query[:, :, max(0, new - policy.window) :] if policy.window else query[:, :, :0],
        valid=valid,
        visual=visual,
        index=places,
        scaling=scaling,
    )
    scores = policy.score(batch)
    if scores.shape != batch.keys.shape[:3]:
        raise MmaccelError(
            f"Method {policy.name!r} returned scores of shape {tuple(scores.shape)} where rows, key heads and keys are "
            f"{tuple(batch.keys.shape[:3])}."
        )
    resolved = torch.tensor(visual_budget(step, stage.retain), device=query.device)
    kept = per_head(scores, visual, resolved)
    text = valid & ~visual
    if owner.recipe.text_retain is None:
        kept = kept | text[:, None]
    else:
        wanted = [resolve(owner.recipe.text_retain, n) for n in text.sum(1).tolist()]
        kept = kept | per_head(scores, text, torch.tensor(wanted, device=query.device))
    old = kept.new_ones(*kept.shape[:2], keys.shape[2] - new)
    layer.evict(torch.cat([old, kept], dim=-1))
    share = (kept & visual[:, None]).sum() / kept.shape[1]
    return torch.stack([visual.sum().float(), resolved.sum().float(), share.float()]).cpu()


def per_head(scores: Tensor, of: Tensor, count: Tensor) -> Tensor:
    """``[B, Hkv, K]`` bool: the ``count[B]`` best keys among ``of [B, K]`` of every head."""
    heads = scores.shape[1]
    return top_mask(scores.flatten(0, 1), of.repeat_interleave(heads, dim=0), count.repeat_interleave(heads)).view_as(
        scores
    )


def visual_budget(step: Step, retain: Retain) -> list[int]:
    """Visual keys that stay in each row: the budgets of its pictures, resolved on their original counts, summed."""
    assert step.layout is not None
    sizes: dict[tuple[int, int], int] = {}
    for segment in step.layout.segments:
        key = (segment.row, segment.picture)
        sizes[key] = sizes.get(key, 0) + len(segment.places)
    out = [0] * len(step.layout.valid)
    for (row, _), size in sizes.items():
        out[row] += resolve(retain, size)
    return out
