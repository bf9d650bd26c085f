"""Budgets of a prompt by layer and row, known before the layers are scored or decided by their content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ...core.budget import kept_whole, resolve
from ...core.layout import Layout
from ...core.reduction import top_mask
from ...kv import budgets
from ...kv.packed import QuantisedLayer
from .rules import CacheRules
from .token_origins import Tokens

#: values of ``layer_budget`` with which budgets do not depend on the content
KNOWN = ("uniform", "pyramid", "kvpress")


@dataclass(frozen=True)
class Waiting:
    """A layer whose attention has run, and whose keys that stay are not chosen yet.

    queries : ``[B, Hq, W, D]``, the last ones of the prompt. scaling, received, expected, unrotated : see
        :class:`~mmaccel.method.KeyBatch`; ``received`` is of the keys of the prompt.
    seen : ``[B]``, the figure of its attention that its budget depends on, for budgets by attention.
    """

    layer: QuantisedLayer
    tokens: Tokens
    queries: Tensor
    scaling: float
    received: Tensor | None
    expected: tuple[Tensor, Tensor] | None
    seen: Tensor | None
    unrotated: Tensor | None = None


def prompt_budget(stage: CacheRules, layout: Layout, notes: list[str]) -> list[int]:
    """Keys that stay in each row in the mean over layers: the budgets of its pictures, resolved on their original counts,
    summed; of all keys of the prompt where text and pictures share one budget. ``notes`` name pictures that are kept whole."""
    retain = stage.visual_retain
    if retain is None:
        return layout.visual.sum(1).tolist()
    if stage.policy.joint:
        # no key competes in a row without a picture
        prompts = (layout.valid.sum(1) * layout.visual.any(1)).tolist()
        notes += kept_whole(stage.policy.name, retain, [n for n in prompts if n], "prompts")
        return [resolve(retain, n) if n else 0 for n in prompts]
    sizes: dict[tuple[int, int], int] = {}
    for segment in layout.segments:
        key = (segment.row, segment.picture)
        sizes[key] = sizes.get(key, 0) + len(segment.places)
    notes += kept_whole(stage.policy.name, retain, list(sizes.values()))
    kept = [0] * len(layout.valid)
    for (row, _), size in sizes.items():
        kept[row] += resolve(retain, size)
    return kept


def known(stage: CacheRules, layout: Layout, budget: list[int]) -> list[list[int]]:
    """Per layer and row: how many of the competing keys stay, for the values of ``layer_budget`` in :data:`KNOWN`."""
    policy, layers = stage.policy, stage.depth
    how, beta = policy.choice("layer_budget")
    if how == "uniform" or beta is None:
        return [budget] * layers
    rows = []
    for count, n in zip(budget, (layout.valid if policy.joint else layout.visual).sum(1).tolist(), strict=True):
        if how == "kvpress":
            rows.append(budgets.pyramid_kvpress(count, policy.window, n, layers, beta))
        elif policy.official and policy.steps_to_last:
            rows.append([min(k, n) for k in budgets.pyramid_windowkv(count, layers, beta)])
        elif policy.official:
            # the program counts the window, which stays where all keys compete
            rows.append(budgets.pyramid_official(count, policy.window if policy.joint else 0, n, layers, beta))
        else:
            rows.append(budgets.pyramid(count, [n] * layers, beta))
    return [list(column) for column in zip(*rows, strict=True)]


def by_content(
    stage: CacheRules, budget: list[int], waiting: list[Waiting], scores: list[Tensor], raw: list[Tensor]
) -> list[list[int]]:
    """Per layer and row: how many of the competing keys stay, for the other values of ``layer_budget``.

    waiting, scores : all layers, and the scores ``[B, Hkv, K]`` of each, infinite where a key is protected. raw : not so.
    """
    policy = stage.policy
    how, uniform = policy.choice("layer_budget")
    home, rows = scores[0].device, []
    seen = [one.seen.to(home) for one in waiting if one.seen is not None]
    shares = torch.stack(seen, dim=1).tolist() if seen else [[1.0] * len(waiting)] * len(budget)
    for row, count in enumerate(budget):
        sizes = [one.tokens.rivals[row] for one in waiting]
        if how in ("sparsity", "entropy") and policy.official:
            rows.append(budgets.clipped_official(count, sizes, torch.tensor(shares[row]), policy.newest))
        elif how == "squeeze":
            low, share = budgets.squeezed(shares[row]), uniform or 0.0
            if policy.official:
                rows.append(budgets.squeezed_official(sizes[0], low, _kept(stage, count, sizes[0]), share))
            else:
                rows.append(budgets.by_squeeze(count, sizes, low, share))
        elif how in ("sparsity", "entropy"):
            rows.append(budgets.by_shares(count, sizes, shares[row], uniform or 0.0))
        elif how == "prefix" and policy.official:
            means = [x[..., at].mean(1).to(home) for x, at in _same_tokens(raw, waiting, row)]
            sure = scores[0][row, 0] == torch.inf
            target = int(sum(sizes) * (1 - _kept(stage, count, sizes[0])))
            rows.append(budgets.prefix_official([one for x in means for one in x], target, int(sure.sum())))
        else:
            mine = [_proportions(x[..., at]) for x, at in _same_tokens(scores, waiting, row)]
            if how == "prefix":
                rows.append(budgets.prefix([x.mean(1).to(home) for x in mine], count))
                continue
            spread = [x.var(2, unbiased=False) if x.shape[2] else x.new_zeros(x.shape[:2]) for x in mine]
            ratios = budgets.variance_ratios(x.to(home).double() for x in spread)
            rows.append(budgets.by_shares(count, sizes, ratios.tolist()))
    return [list(column) for column in zip(*rows, strict=True)]


def _kept(stage: CacheRules, count: int, size: int) -> float:
    """The share of ``size`` keys that stays in the mean over layers, as the user gave it if it is one."""
    return count / max(1, size) if stage.retain is None or isinstance(stage.retain, int) else stage.retain


def globally(stage: CacheRules, budget: list[int], waiting: list[Waiting], scores: list[Tensor]) -> list[Tensor]:
    """The scores ``[B, Hkv, K]`` of all layers with ``-inf`` for what is not among the best of all layers and heads: as many
    stay in the mean over both as the ``budget`` of each row says."""
    home, parts = scores[0].device, []
    for one, mine in zip(waiting, scores, strict=True):
        visual = one.tokens.places >= 0 if stage.policy.joint else one.tokens.visual
        among = visual.to(mine.device)[:, None].expand_as(mine)
        parts.append((mine.flatten(1).to(home), among.flatten(1).to(home)))
    heads = sum(one.shape[1] for one in scores)
    ranked, among = (torch.cat(list(x), dim=1) for x in zip(*parts, strict=True))
    whole = [n * heads for n in budget]
    if stage.policy.official and isinstance(stage.retain, float):
        # the program rounds the number of all keys, and drops the last that is within it
        sizes = [[n * x.shape[1] for n in one.tokens.rivals] for one, x in zip(waiting, scores, strict=True)]
        whole = [int(stage.retain * n) - 1 for n in map(sum, zip(*sizes, strict=True))]
    count = torch.tensor(whole).clamp(min=0)
    kept = top_mask(ranked, among, count.to(home)) | ~among
    each = kept.split([one[0].numel() for one in scores], dim=1)
    return [x.masked_fill(~mask.view_as(x).to(x.device), -torch.inf) for x, mask in zip(scores, each, strict=True)]


def _same_tokens(scores: list[Tensor], waiting: list[Waiting], row: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores ``[n, Hkv, K]`` of one row in consecutive layers with the same tokens and numbers of heads, and the slots of the
    keys that compete."""
    for _, same in groupby(zip(scores, waiting, strict=True), lambda one: (id(one[1].tokens), one[0].shape[1])):
        mine = list(same)
        yield torch.stack([x[row] for x, _ in mine]), mine[0][1].tokens.at[row]


def _proportions(scores: Tensor) -> Tensor:
    """Scores ``[..., n]`` as shares that are not negative; keys that must stay count as the best of the others."""
    if not scores.shape[-1]:
        # a row without pictures
        return scores
    finite = scores.isfinite()
    most = scores.masked_fill(~finite, -torch.inf).amax(-1, keepdim=True).nan_to_num(1.0, 1.0, 1.0)
    scores = torch.where(scores == torch.inf, most, scores)
    least = scores.masked_fill(~scores.isfinite(), torch.inf).amin(-1, keepdim=True).clamp(max=0.0)
    return (scores - least).nan_to_num(0.0, 0.0, 0.0)
