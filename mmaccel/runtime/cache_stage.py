"""The cache stage of a recipe: what a policy may know of the model, and how a layer loses what does not stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.budget import Retain
from ..kv.merge import merge
from ..kv.packed import QuantisedLayer
from ..kv.scoring.importance import outgoing_norm
from ..method import Policy
from .plan import ModelPlan, PlannedStage


@dataclass(frozen=True)
class CacheStage:
    """A policy with all that a recipe says about it.

    retain, text_retain : the budgets of visual keys (of all keys if the policy is ``joint``) and of text; None: no budget.
    official : the authors' roundings are used.
    text : the text model. depth : how many layers it has.
    """

    policy: Policy
    retain: Retain | None
    text_retain: Retain | None
    official: bool
    text: Any
    depth: int

    @staticmethod
    def of(plan: ModelPlan, stage: PlannedStage[Policy], depth: int) -> CacheStage:
        """The cache stage of a plan, for a cache of ``depth`` layers."""
        recipe = plan.recipe
        official = recipe.rounding == "official"
        return CacheStage(stage.method, stage.retain, recipe.text_retain, official, plan.family.text, depth)

    def outgoing(self, number: int, values: Tensor) -> Tensor | None:
        """Norms of ``values [B, Hkv, K, D]`` behind the output projection of layer ``number``, if the policy looks at them."""
        if not self.policy.needs_outgoing:
            return None
        weight: Tensor = self.text.layers[number].self_attn.o_proj.weight
        return outgoing_norm(values, weight.detach().unflatten(1, (-1, values.shape[3])))

    def evict(self, layer: QuantisedLayer, kept: Tensor, old: int = 0, lengths: Tensor | None = None) -> None:
        """Evict, or merge, what is not ``kept [B, Hkv or 1, K]``; the first ``old`` slots take no part in a merge, nor do
        keys that were packed: they would be quantised again. For ``lengths`` see :meth:`.layer.CompressedLayer.evict`."""
        how, decay = self.policy.choice("compact")
        layer.schedule.evicted = layer.seen
        if how == "evict":
            layer.evict(kept, lengths=lengths)
            return
        keys, values = layer.stored()
        there = ((layer.index.by_head >= 0) & ~layer.once()).expand(keys.shape[:3]).clone()
        there[..., :old] = False
        stay = kept.expand(keys.shape[:3]) & there
        made = merge(
            how,
            keys,
            values,
            stay,
            there & ~stay,
            decay=decay or 0.0,
            threshold=layer.schedule.threshold,
            by_rank=self.official,
            few=lengths is None,
        )
        if self.policy.scheduled:
            layer.schedule.threshold = made.threshold
        layer.evict(kept, (made.keys, made.values), lengths)
