"""Selection of keys: ranked by a policy, the best of every head within its budget. Pure functions of tensors."""

import torch
from torch import Tensor

from ..core.masks import suffix_sums
from ..core.reduction import top_mask
from ..method import KeyBatch, LayerAttention, Policy
from ..method.results import check_numbers, check_tensor
from . import budgets
from .scoring.chunks import by_chunks
from .scoring.error import eviction_error


def scored(policy: Policy, keys: KeyBatch) -> Tensor:
    """The policy's scores, ``[B, Hkv, K]`` float; checked."""
    scores = check_tensor(policy, "score()", policy.score(keys), "float", keys.keys.shape[:3], keys.keys)
    check_numbers(policy, "score()", scores, keys.valid[:, None])
    how = policy.choice("eviction_error")[0]
    return scores if how == "none" else eviction_error(scores, keys, exact=how == "exact")


def observed(policy: Policy, attention: LayerAttention, before: Tensor) -> Tensor:
    """Statistics that the policy observes of an attention, ``[B, Hkv, K]`` float; checked."""
    return check_tensor(policy, "observe()", policy.observe(attention, before), "float", before.shape, before)


def rank(
    policy: Policy, keys: KeyBatch, start: bool = True, question: Tensor | None = None, scores: Tensor | None = None
) -> Tensor:
    """The policy's scores ``[B, Hkv, K]`` with those of protected keys infinite and those of padding lowest.

    start : whether the first of these keys are the first of the sequence, so that ``sinks`` means them.
    question : ``[B, 2]`` long, the places between which ``protect=("question",)`` protects text.
    scores : those of another policy, or those of this one that are there already; what is protected is that of ``policy``.
    """
    scores = scored(policy, keys) if scores is None else scores
    if policy.neighbours:
        scores = by_chunks(scores, keys, policy.neighbours)
    must = protected(policy, keys, start, question)
    if keys.merged is not None:
        # what others were merged into stays
        scores = scores.masked_fill(keys.merged > 0, torch.inf)
    return scores.masked_fill(must[:, None], torch.inf).masked_fill(~keys.valid[:, None], -torch.inf)


def protected(policy: Policy, keys: KeyBatch, start: bool = True, question: Tensor | None = None) -> Tensor:
    """``[B, K]`` bool: sinks, recent keys, and the kinds that the recipe protects."""
    valid = keys.valid
    must = torch.zeros_like(valid)
    if policy.sinks and start:
        must |= valid.cumsum(1) <= policy.sinks
    if policy.recent:
        held = valid.sum(1, keepdim=True)
        newest = policy.recent if isinstance(policy.recent, int) else (held * policy.recent + 0.5).long()
        must |= suffix_sums(valid) <= newest
    if "separators" in policy.protect and keys.cells is not None:
        must |= keys.visual & (keys.cells[..., 0] < 0)
    if "question" in policy.protect and question is not None:
        at = question.to(keys.index.device)
        must |= ~keys.visual & (keys.index >= at[:, :1]) & (keys.index < at[:, 1:])
    return must & valid


def choose(policy: Policy, scores: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """``[B, Hkv, K]`` bool: what stays of the keys ``candidates [B, K]``, ``count [B]`` in the mean over heads.

    A policy whose budget is not exact drops what it scores ``-inf``; without a budget it drops nothing else.
    """
    how, floor = policy.choice("head_budget")
    if policy.budget == "none":
        kept = candidates[:, None].expand_as(scores)
    elif how == "uniform" or floor is None:
        kept = per_head(scores, candidates, count)
    elif how == "safeguard":
        kept = budgets.safeguard(scores, candidates, count, floor)
    else:
        rivals = budgets.concentrated(scores, candidates, count) if how == "concentrated" else scores
        kept = per_head(scores, candidates, budgets.adaptive(rivals, candidates, count, floor, policy.official))
    return kept & (scores > -torch.inf) if policy.drops_lowest else kept


def per_head(scores: Tensor, of: Tensor, count: Tensor) -> Tensor:
    """``[B, Hkv, K]`` bool: the best keys among ``of [B, K]`` of every head, ``count [B]`` or ``[B, Hkv]``."""
    heads = scores.shape[1]
    if heads > 1:
        of, count = of.repeat_interleave(heads, dim=0), count if count.dim() == 2 else count.repeat_interleave(heads)
    return top_mask(scores.flatten(0, 1), of, count.flatten()).view_as(scores)
