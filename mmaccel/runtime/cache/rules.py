"""The cache stage of a recipe: a policy with its budgets, and how a layer evicts keys by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.budget import Retain
from ...families.base import Family
from ...kv.layer_batch import Asking, LayerBatch
from ...kv.merge import merge
from ...kv.scoring.importance import outgoing_norm
from ...method import Policy
from ..call.plan import ModelPlan, PlannedStage


@dataclass(frozen=True)
class CacheRules:
    """A policy with all that a recipe says about it.

    retain, text_retain : the budgets of visual keys (of all keys if the policy is ``joint``) and of text; None: no budget.
    family : of the model. depth : how many of its layers have attention, and keys in the cache.
    more : by how much more keys stay than the budget says, since a codec packs them.
    """

    policy: Policy
    retain: Retain | None
    text_retain: Retain | None
    family: Family
    depth: int
    more: float = 1.0

    @staticmethod
    def of(plan: ModelPlan, stage: PlannedStage[Policy], depth: int) -> CacheRules:
        """The cache stage of a plan, for a cache of ``depth`` layers."""
        given = stage.method, stage.retain, plan.recipe.text_retain, plan.family, depth
        return CacheRules(*given, _more(plan) if stage.method.budget_in == "bytes" else 1.0)

    @property
    def visual_retain(self) -> Retain | None:
        """The budget in keys."""
        if self.retain is None or self.more == 1:
            return self.retain
        if isinstance(self.retain, int):
            return int(self.retain * self.more)
        return min(1.0, self.retain * self.more)

    def outgoing(self, number: int, values: Tensor) -> Tensor | None:
        """Norms of ``values [B, Hkv, K, D]`` of layer ``number`` of the cache behind its output projection, if the policy looks
        at them."""
        if not self.policy.needs_outgoing:
            return None
        weight: Tensor = self.family.outgoing_in(self.family.attending[number]).weight
        return outgoing_norm(values, weight.detach().unflatten(1, (-1, values.shape[3])))

    def evicting(self, together: LayerBatch, kept: Tensor, lengths: Tensor | None = None, old: int = 0) -> Asking:
        """Evict, or merge, the keys that are not ``kept [R, Hkv or 1, K]``; the first ``old`` slots take no part in a merge,
        nor do packed keys, which would be quantised again. For ``lengths`` see :meth:`.layer.CompressedLayer.evict`."""
        asked = together.needed_on_host(kept)
        known = (yield asked) if asked else None
        how, decay = self.policy.choice("compact")
        if how == "evict":
            together.evict(kept, lengths=lengths, known=known)
            return
        keys, values = together.stored
        mergeable = together.loose.expand(keys.shape[:3])
        if old:
            mergeable = mergeable & (torch.arange(keys.shape[2], device=keys.device) >= old)
        stay = kept.expand(keys.shape[:3]) & mergeable
        merged = merge(
            how,
            keys,
            values,
            stay,
            mergeable & ~stay,
            decay=decay or 0.0,
            threshold=together.threshold,
            renewed=any(layer.schedule.renewed for layer in together.layers),
            by_rank=self.policy.official,
            share=self.policy.merge_share,
            most=None if lengths is None else int((together.lengths - lengths).max()),
            stay=None if lengths is None else int(lengths.max()),
        )
        if self.policy.scheduled and merged.threshold is not None:
            for layer, bar in zip(together.layers, merged.threshold.split(together.rows), strict=True):
                layer.schedule.threshold, layer.schedule.renewed = bar, False
        together.evict(kept, (merged.keys, merged.values), lengths, known)


def _more(plan: ModelPlan) -> float:
    """The bits of a number of the model over those of one that its visual keys are packed in."""
    codec = next((group.codec for group in plan.token_groups if group.of != "text"), None)
    if codec is None:
        return 1.0
    layer = plan.family.attending[0]
    return max(1.0, torch.finfo(plan.family.model.dtype).bits / codec.packed_bits(plan.family.heads_in(layer)[1]))
