"""What a recipe does in one forward of the text model behind the attention of every layer, and behind the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.precision import without_autocast
from ...core.stats import Stage as StageStats
from ...kv.cache import CacheState
from ...kv.codecs import TokenGroup
from ...method import LayerAttention, LayerMethod, Policy
from ...method.results import figures_of
from ..cache.eviction import Eviction
from ..cache.packing import Packing
from ..layers import reactivation as returning
from ..prompt import tokens
from .forward import Continuation, Forward, Prompt, chosen_of
from .plan import PlannedStage, record


class Stages:
    """The stages of a recipe in one forward.

    attended : layers whose attention has run through our function.
    """

    def __init__(self, forward: Forward) -> None:
        plan, state, policy = forward.plan, forward.state, forward.plan.policy
        self.forward = forward
        self.attended = 0
        self.eviction: Eviction | None = None
        if policy is not None and state is not None and (isinstance(forward, Prompt) or policy.method.decodes):
            self.eviction = Eviction(forward, policy, state)
        self.packing = Packing(forward, state, self.eviction) if plan.token_groups and state is not None else None
        self._packed: set[int] = set()
        returns = isinstance(forward, Continuation) and forward.returns
        watched = returns or isinstance(forward, Prompt)
        # nothing is to be done behind the attention of any layer, as in most decode steps
        self._idle = not watched and self.eviction is None and self.packing is None

    def after_attention(
        self, number: int, query: Tensor, key: Tensor, visible: Tensor | None, scaling: float, window: int | None
    ) -> None:
        """Called by the attention function with ``query [B, Hq, q, D]`` and ``key [B, Hkv, K, D]`` of layer ``number`` of the
        cache."""
        self.attended += 1
        if self._idle:
            return
        with without_autocast(query.device):
            self._after_attention(number, query, key, visible, scaling, window)

    def _after_attention(
        self, number: int, query: Tensor, key: Tensor, visible: Tensor | None, scaling: float, window: int | None
    ) -> None:
        forward, device = self.forward, query.device
        returns, stage = isinstance(forward, Continuation) and forward.returns, None
        if (returns or isinstance(forward, Prompt)) and forward.plan.stage_at_layer:
            stage = forward.plan.stage_at_layer.get(forward.plan.family.attending[number] + 1)
        if isinstance(forward, Continuation) and stage is not None:
            returning.look(forward, stage.method, number, query, key, visible, scaling)
        elif (
            isinstance(forward, Prompt)
            and stage is not None
            and not stage.method.looks_ahead
            and not tokens.rests(forward, stage)
        ):
            chosen = chosen_of(forward.phase(number))
            text = (chosen >= 0) & ~forward.layout.visual.gather(1, chosen.clamp(min=0))
            with forward.measured("selection", device):
                prepared = {}
                if known := forward.prepared.get(type(stage.method)):
                    at = chosen.clamp(min=0).to(device, non_blocking=True)
                    prepared = {name: figures.to(device).gather(1, at) for name, figures in known.items()}
                there = text.to(device, non_blocking=True)
                attention = LayerAttention(query, key, visible, scaling, there, text, prepared)
                seen = figures_of(stage.method, attention)
            forward.looked = {name: figures[:, -query.shape[2] :] for name, figures in seen.items()}
        if isinstance(forward, Prompt) and forward.chunked is not None and forward.chunked.due(number + 1):
            there = forward.phase(number).places >= 0
            with forward.measured("selection", device):
                forward.chunked.look(number, LayerAttention(query, key, visible, scaling, there))
        if self.eviction is not None:
            self.eviction.after_attention(number, query, key, visible, scaling, window)
        if self.packing is not None:
            self.packing.note_queries(number, query, key.shape[1])
            self._pack([number] if self.eviction is None else self.eviction.done(number), device)

    def finish(self) -> None:
        """The last layer has run: what waited for it."""
        with without_autocast(self.forward.device):
            self._finish()

    def _finish(self) -> None:
        forward, eviction, packing = self.forward, self.eviction, self.packing
        device = forward.phase(0).places.device
        if eviction is not None:
            eviction.settle()
        if packing is not None:
            self._pack([number for number in range(len(packing.state.layers)) if number not in self._packed], device)
        if packing is not None and packing.waiting:
            with forward.measured("packing", device):
                packing.settle()

    def _pack(self, layers: list[int], device: torch.device) -> None:
        """Pack what is due of layers from which nothing is evicted any more."""
        packing = self.packing
        if packing is None or not layers:
            return
        with self.forward.measured("packing", device, layers):
            for number in layers:
                packing.pack(number)
        self._packed.update(layers)

    def record(self) -> None:
        """Add to the statistics what became of the keys of a prompt, and what methods have spread over layers."""
        forward = self.forward
        for stage in {stage.number: stage for stage in forward.plan.stage_at_layer.values()}.values():
            if stage.method.spreads:
                _note_average(forward, stage)
        if self.eviction is not None and self.eviction.figures:
            _record_cache(forward, self.eviction.stage, self.eviction.figures)
        if forward.state is not None:
            for group in forward.plan.token_groups:
                if group.of != "salient":
                    _record_codec(forward, forward.state, group)


def _note_average(forward: Forward, stage: PlannedStage[LayerMethod]) -> None:
    """Say what the layers at which a method works had on average."""
    stats, at = forward.stats, stage.method.layers()
    mean = sum(stats.layer_tokens[i] for i in at) / len(at)
    stats.notes.append(
        f"{stage.method.name} spreads its budget: layers {at[0]} to {at[-1]} have {mean:.4g} visual tokens on average, and the "
        f"last {stats.layer_tokens[-1]}"
    )


def _record_cache(forward: Forward, stage: PlannedStage[Policy], layers: list[Tensor]) -> None:
    """The mean over layers of keys that there were, were to stay, and stayed."""
    policy, notes = stage.method, forward.stats.notes
    there, resolved, kept = torch.stack(layers).double().mean(0).tolist()
    record(forward.stats, stage, round(there), round(resolved), round(kept))
    if policy.budget == "adaptive" and not policy.recalls:
        notes.append(
            f"{policy.name} lets the content decide: of {there:g} keys a layer {resolved:g} were asked for, and "
            f"{kept:g} stay"
        )
    if kept == there and not policy.recalls and (policy.deferred or len(forward.plan.stages) > 1):
        why = "; it drops keys of tokens that a later layer dropped" if policy.deferred else ""
        notes.append(f"stage {stage.number} ({policy.name}) left all keys that reached it{why}")


def _record_codec(forward: Forward, state: CacheState, group: TokenGroup) -> None:
    """A codec drops nothing: what it finds is what stays."""
    stats, codec = forward.stats, group.codec
    figures = stats.stages.setdefault(group.stage, StageStats("codec", codec.name, resolved=None))
    if group.of != "text":
        before = [s.tokens_kept for s in stats.stages.values() if s.site == "cache"]
        figures.tokens_in = figures.tokens_kept = before[0] if before else stats.layer_tokens[-1]
    own = {other.number for other in forward.plan.token_groups if other.stage == group.stage}
    if not any(width for layer in state.layers for n, width in enumerate(layer.widths) if n in own):
        what = f"{group.of} tokens" if group.of in ("text", "visual") else "tokens"
        stats.notes.append(
            f"{codec.name} has packed nothing: it packs {codec.page} {what} at a time, beyond the newest {codec.residual}."
        )
