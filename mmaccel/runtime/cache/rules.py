"""The cache stage of a recipe: a policy with its budgets, and how a layer evicts keys by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.budget import Retain
from ...errors import MmaccelError
from ...families.base import Family
from ...kv.codecs import TokenGroup
from ...kv.layer_batch import Asking, LayerBatch
from ...kv.merge import merge
from ...kv.merged_keys import MergedKeys, into_likest, into_runs, means
from ...kv.scoring.importance import outgoing_norm
from ...method import Policy
from ..call.plan import ModelPlan, PlannedStage


@dataclass(frozen=True)
class CacheRules:
    """A policy with all that a recipe says about it.

    retain, text_retain : the budgets of visual keys (of all keys if the policy is ``joint``) and of text; None: no budget.
    family : of the model. depth : how many of its layers have attention, and keys in the cache.
    bits : share of the bytes of a key that one takes which stays, and one which does not: 1 and 0 unless the budget is of
        bytes.
    rest : the group of the keys that do not stay, which are packed; None where they are evicted.
    """

    policy: Policy
    retain: Retain | None
    text_retain: Retain | None
    family: Family
    depth: int
    bits: tuple[float, float] = (1.0, 0.0)
    rest: TokenGroup | None = None

    @staticmethod
    def of(plan: ModelPlan, stage: PlannedStage[Policy], depth: int) -> CacheRules:
        """The cache stage of a plan, for a cache of ``depth`` layers."""
        given = stage.method, stage.retain, plan.recipe.text_retain, plan.family, depth
        rest = next((group for group in plan.token_groups if group.of == "rest"), None)
        return CacheRules(*given, _bits(plan) if stage.method.budget_in == "bytes" else (1.0, 0.0), rest)

    @property
    def visual_retain(self) -> Retain | None:
        """The budget in keys.

        Raises
        ------
        MmaccelError
            If the keys that do not stay take up the budget alone.
        """
        stays, rest = self.bits
        if self.retain is None or self.bits == (1, 0):
            return self.retain
        if isinstance(self.retain, int):
            if rest:
                raise MmaccelError(
                    f"retain={self.retain} is a number of keys, and rest={self.policy.rest!r} with budget_in='bytes' needs a "
                    "share: give a share from 0 to 1, or leave out budget_in."
                )
            return int(self.retain / stays)
        if self.retain <= rest or stays <= rest:
            raise MmaccelError(
                f"retain={self.retain:g} leaves no bytes for keys that stay: with rest={self.policy.rest!r} the others take "
                f"{rest:.3g} of the bytes of all, and one that stays {stays:.3g} of its own; retain more, or fewer bits."
            )
        return min(1.0, (self.retain - rest) / (stays - rest))

    def outgoing(self, number: int, values: Tensor) -> Tensor | None:
        """Norms of ``values [B, Hkv, K, D]`` of layer ``number`` of the cache behind its output projection, if the policy looks
        at them."""
        if not self.policy.needs_outgoing:
            return None
        weight: Tensor = self.family.outgoing_in(self.family.attending[number]).weight
        return outgoing_norm(values, weight.detach().unflatten(1, (-1, values.shape[3])))

    def evicting(
        self,
        together: LayerBatch,
        kept: Tensor,
        lengths: Tensor | None = None,
        old: int = 0,
        spots: Tensor | None = None,
    ) -> Asking:
        """Evict or merge the keys that are not ``kept [R, Hkv or 1, K]``; the first ``old`` slots take no part in a
        merge, nor do packed keys, which would be quantised again. For ``lengths`` see :meth:`.layer.CompressedLayer.evict`;
        ``spots``, some of the kept ones, are where the others of a prompt are merged if few keys take up all."""
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
        if how == "residual":
            gone = mergeable & ~stay
            together.evict(kept, self._into_few(together, gone, mergeable, spots), lengths, known)
            return
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

    def _into_few(
        self, together: LayerBatch, gone: Tensor, loose: Tensor, spots: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of ``together`` with all that are ``gone [R, Hkv, K]`` merged into few: those at the ``spots`` of a
        prompt, or while decoding those that others were merged into before, if they are ``loose``."""
        (keys, values), index = together.stored, together.index.long()
        layers, shared = together.layers, together.layers[0].shared
        memory = shared.memory(MergedKeys)
        if spots is not None:
            memory = memory or shared.keep(MergedKeys(self.policy.merge_weight))
            slots, there, share = into_runs(gone, spots.expand(gone.shape), self.policy.merged_keys)
        elif memory is None:
            return keys, values
        else:
            places, counts = memory.of_layers([layer.number for layer in layers], gone[:, :, 0])
            where = (index[:, :, None] == places[..., None]) & (places >= 0)[..., None]
            slots = where.byte().argmax(-1)
            there = where.any(-1) & loose.gather(2, slots)
            share = into_likest(keys, gone, slots, there, counts)
        found = index.expand(gone.shape).gather(2, slots).masked_fill(~there, -1), share.sum(-1)
        for layer, place, count, held in zip(layers, *(x.split(together.rows) for x in (*found, there)), strict=True):
            memory.note(layer.number, place, count, None if spots is not None else held)
        return means(keys, slots, there, share), means(values, slots, there, share)


def _bits(plan: ModelPlan) -> tuple[float, float]:
    """The bits of a number of visual keys that stay, and of those that do not, over the bits of a number of the model."""
    bits, width = torch.finfo(plan.family.model.dtype).bits, plan.family.heads_in(plan.family.attending[0])[1]

    def share(kinds: Sequence[str], otherwise: float) -> float:
        codec = next((group.codec for group in plan.token_groups if group.of in kinds), None)
        return otherwise if codec is None else min(1.0, codec.packed_bits(width) / bits)

    return share(("all", "visual", "salient"), 1.0), share(("rest",), 0.0)
