"""Eviction in one forward: a policy scores, a budget is split, the other keys are evicted or merged.

What happens at the end of a prompt is in :mod:`.prompt_eviction`, what happens while decoding in :mod:`.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.precision import without_autocast
from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.merged_keys import MergedKeys
from ...kv.select import observed
from ...method import LayerAttention, Policy
from ...method.layers import SharedPass
from ..call.call import Call, current
from ..call.forward import Continuation, Forward, Prompt, rows_at, to_device_packed
from ..call.plan import ModelPlan, PlannedStage, record
from ..call.runs import KeysToRead, LayerAttended, Run, TextInputs
from ..prompt import lookahead, reread
from .prompt_eviction import PromptEviction
from .rules import CacheRules
from .schedule import Schedule


class CachePolicy(Run):
    """The policy of a recipe in one forward.

    prompt : its work at the end of a prompt; None for a continuation.
    """

    def __init__(self, forward: Forward, stage: PlannedStage[Policy], state: CacheState) -> None:
        self.forward, self.stage, self.state = forward, stage, state
        self.policy, self.depth = stage.method, len(state.layers)
        rules = CacheRules.of(forward.plan, stage, self.depth)
        self.schedule = Schedule(rules, state)
        self.prompt = PromptEviction(rules, state, forward, self.schedule) if isinstance(forward, Prompt) else None
        # a schedule counts all queries behind a prompt
        self.last_queries = None if self.prompt is None else self.policy.window
        if rules.rest is not None and self.prompt is not None:
            looks_at = rules.rest.codec.window
            self.last_queries = None if looks_at is None else max(looks_at, self.policy.window)

    @property
    def pictured(self) -> dict[int, Tensor]:
        """See :class:`.evictor.Evictor`; empty for a continuation."""
        return {} if self.prompt is None else self.prompt.evictor.pictured

    def released(self, number: int) -> list[int]:
        """Layers from which nothing is evicted any more in this forward, since the attention of layer ``number`` has run."""
        return [number]

    @property
    def waiting(self) -> Collection[int]:
        """Layers that have attended and are evicted from soon, together with others."""
        return () if self.prompt is None or self.prompt.late else self.prompt.scores.waiting

    def finish(self) -> None:
        """Add the keys of a prompt to the statistics, as means over layers: candidates, their budget, and how many stay."""
        if self.prompt is None or not self.prompt.evictor.figures:
            return
        policy, stage, stats = self.policy, self.stage, self.forward.stats
        candidates, resolved, kept = torch.stack(self.prompt.evictor.figures).double().mean(0).tolist()
        record(stats, stage, round(candidates), round(resolved), round(kept))
        if policy.budget == "adaptive" and not policy.recalls:
            stats.notes.append(
                f"{policy.name} lets the content decide: of {candidates:g} keys a layer {resolved:g} were asked for, and "
                f"{kept:g} stay"
            )
        if kept == candidates and not policy.recalls and (policy.deferred or len(self.forward.plan.stages) > 1):
            why = "; it drops keys of tokens that a later layer dropped" if policy.deferred else ""
            stats.notes.append(f"stage {stage.number} ({policy.name}) left all keys that reached it{why}")


class EvictKeys(CachePolicy):
    """Evict keys at the end of a prompt, and while decoding by a schedule.

    pre_rope, unrotated : ``[B, q, H D]`` or ``[B, q, H, D]``, queries and keys of the layer at work before RoPE, if the policy
        looks at them.
    heads : query heads of the layers.
    entering : ``[B, q, D]``, the input of the layer at work, if budgets depend on how attention turns it.
    """

    def __init__(self, forward: Forward, stage: PlannedStage[Policy], state: CacheState) -> None:
        super().__init__(forward, stage, state)
        self.pre_rope: Tensor | None = None
        self.entering: Tensor | None = None
        self.unrotated: Tensor | None = None
        self._observed: tuple[LayerAttention, Tensor | None] | None = None
        #: query heads of each layer
        self.heads: dict[int, int] = {}

    @property
    def carries(self) -> bool:
        """Whether queries and figures of this part of a prompt are needed for later parts."""
        return False

    @property
    def shrinks(self) -> bool:
        """Whether a schedule may evict when this forward is over."""
        prompt, policy = self.prompt, self.policy
        behind = prompt is None or policy.cap > 0 or policy.age != () or prompt.tokens.text_rows is not None
        return policy.scheduled and behind

    def released(self, number: int) -> list[int]:
        """Layers from which nothing is evicted any more in this forward, since the attention of layer ``number`` has run."""
        if self.shrinks:
            return []
        if self.prompt is None:
            return [number]
        evictor = self.prompt.evictor
        done, evictor.done = evictor.done, []
        return done

    def before_text(self, text: TextInputs) -> None:
        """Let the policy observe the queries that a schedule remembers: a prompt begins. Note padding between two turns."""
        forward = self.forward
        if isinstance(forward, Prompt):
            self.schedule.catch_up(forward.first_time)
        if self.policy.needs_separators and isinstance(forward, (Prompt, Continuation)) and forward.ids is not None:
            self._note_separators(forward, forward.ids)
        if self.policy.needs_ordinals and forward.seen and text.valid is not None:
            self.state.shared.places.note_tokens(text.valid.to(forward.device, non_blocking=True), forward.seen)

    def _note_separators(self, forward: Prompt | Continuation, ids: Tensor) -> None:
        """Note which of the new tokens ``ids [B, S]`` are separators, if a tokenizer says so."""
        processor = forward.plan.family.processor
        if processor is not None:
            known = self.policy.separator_ids(getattr(processor, "tokenizer", processor))
            separators = to_device(torch.isin(ids, to_device(known, ids.device)), forward.device)
            anew = forward.first_time if isinstance(forward, Prompt) else None
            self.state.shared.places.note_separators(separators, forward.seen, anew)

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """The attention of a prompt from the pass in which the policy sums it over the queries: on a CPU both cost what the
        output alone does. None where the policy does not sum it, and on a GPU, whose kernels are faster. What the policy
        observed is used in :meth:`after_attention`."""
        query = layer.query
        if self.prompt is None or not layer.plain or not self.policy.observes:
            return None
        if query.device.type != "cpu" or query.requires_grad:
            return None
        tokens = self.prompt.tokens.of_layer(layer.number, query.device)
        shared = SharedPass(query, layer.value, self.prompt.split == "entropy")
        attention = LayerAttention(
            query,
            layer.key,
            layer.visible,
            layer.scaling,
            tokens.text,
            memo=tokens.memo,
            shared_pass=shared,
            places=tokens.places,
        )
        self._observed = attention, self._observe(layer.number, attention, tokens.places, layer.window)
        if shared.found is None or shared.found.read is None:
            return None
        return KeysToRead(output=shared.found.read.transpose(1, 2).contiguous())

    def after_attention(self, layer: LayerAttended) -> None:
        """Score the keys of a prompt, and evict from layers that do not wait; while decoding remember queries."""
        number, query, key = layer.number, layer.query, layer.key
        self.heads[number] = query.shape[1]
        if self.prompt is not None:
            prompt, tokens = self.prompt, self.prompt.tokens.of_layer(number, query.device)
            timed = (
                self.forward.measured("selection", query.device, [number]) if prompt.reads_attention else nullcontext()
            )
            with timed:
                if self._observed is None:
                    given = query, key, layer.visible, layer.scaling, tokens.text
                    attention = LayerAttention(*given, memo=tokens.memo, places=tokens.places)
                    received = self._observe(number, attention, tokens.places, layer.window)
                else:
                    (attention, received), self._observed = self._observed, None
                if (rest := prompt.rules.rest) is not None:
                    asked = rest.codec.query_energy(query, tokens.places, key.shape[1])
                    if asked is not None:
                        prompt.evictor.query_energy[number] = asked
                # these queries are large, and free before anything is chosen
                expected, self.pre_rope = prompt.tokens.expected(tokens, key, self.pre_rope), None
                unrotated, self.unrotated = self.unrotated, None
                prompt.after_attention(number, attention, tokens, received, expected, unrotated)
            prompt.flush_if_full()
        elif self.policy.scheduled:
            phase = self.forward.phase(number)
            places = phase.places.to(query.device, non_blocking=True)
            padding = self.forward.length - phase.lengths if phase.padded else None
            self.schedule.note(self.state.layers[number], query, places, layer.scaling, layer.window, padding)

    def finish(self) -> None:
        """Evict from the layers that waited for the end of the forward."""
        if self.prompt is not None:
            self.prompt.finalize()
        if self.shrinks:
            with self.forward.measured("selection", self.forward.phase(0).places.device):
                if self.prompt is not None and self.policy.age:
                    self.schedule.drop_old(self.prompt.tokens.table)
                self.schedule.finalize(None if self.prompt is None else self.prompt.tokens.pictured_rows)
        if MergedKeys in self.state.shared.memories:
            self._prepare_masks()
        super().finish()

    def _prepare_masks(self) -> None:
        """Make the masks of merged keys, which steps between two evictions find."""
        merged = self.state.shared.memory(MergedKeys)
        assert merged is not None
        for layer in self.state.layers:
            merged.prepare(layer.number, layer.index, self.heads[layer.number], layer.keys)

    def _observe(self, number: int, attention: LayerAttention, places: Tensor, window: int | None) -> Tensor | None:
        """The policy's statistics of the attention of a layer, ``[B, Hkv, K]`` float32; a schedule carries them on."""
        policy, schedule, key = self.policy, self.state.layers[number].schedule, attention.key
        received = None
        if policy.observes:
            before = schedule.figures(key.shape[2])
            before = key.new_zeros(key.shape[:3], dtype=torch.float32) if before is None else before
            if (merged := self.forward.incoming.merged) is not None:
                counts = merged.of_slots(number, self.state.layers[number].index.by_head)
                query, key = merged.widened(attention.query, key, counts, attention.scaling)
                attention = replace(attention, query=query, key=key)
            received = observed(policy, attention, before)
            rows = None if self.prompt is None else self.prompt.tokens.text_rows
            if rows is not None and not policy.observes_steps:
                received = torch.where(to_device(rows, received.device)[:, None, None], before, received)
        if policy.scheduled or self.carries:
            schedule.received, schedule.scaling, schedule.window = received, attention.scaling, window
            if policy.window:
                # those of a whole prompt are large
                last = slice(-policy.window, None)
                schedule.remember(attention.query[:, :, last].clone(), places[:, last].clone())
                schedule.keep(policy.window)
        return received


class EvictByText(EvictKeys):
    """Evict the keys of a prompt by what a model makes of it when it is over, by default by a text that is read behind it."""

    runs_model = True
    stage: PlannedStage[Any]

    def __init__(self, call: Call[ModelPlan], prompt: Prompt, stage: PlannedStage[Any], state: CacheState) -> None:
        super().__init__(prompt, stage, state)
        self.call, self.arguments = call, dict[str, Any]()

    def before_text(self, text: TextInputs) -> None:
        """Keep the arguments of the text model, which are not complete yet."""
        with without_autocast(self.forward.device):
            super().before_text(text)
        self.arguments = text.arguments

    def read(self, evicted: PromptEviction) -> None:
        """Read the text, and keep with the scores what the policy needs of it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Read the text, and evict."""
        assert self.prompt is not None
        with self.prompt.prompt.measured("selection", self.forward.device):
            self.read(self.prompt)
        with without_autocast(self.forward.device):
            super().finish()


class EvictByDraft(EvictByText):
    """The text is what a draft model writes behind the prompt."""

    def read(self, evicted: PromptEviction) -> None:
        """Keep queries, keys and values of the draft's text."""
        positions = self.arguments.get("position_ids")
        evicted.scores.behind = lookahead.text_behind(self.call, evicted.prompt, self.stage, positions)


class EvictByOwnText(EvictByText):
    """The text is what the model itself writes behind the prompt."""

    def read(self, evicted: PromptEviction) -> None:
        """Keep queries, keys and values of the text."""
        prompt = evicted.prompt
        assert self.hidden is not None
        (last,) = to_device_packed(self.hidden.device, prompt.chosen.argmax(1))
        hidden = rows_at(self.hidden, last[:, None])[:, 0]
        positions, count = self.arguments.get("position_ids"), evicted.policy.lookahead
        evicted.scores.behind = lookahead.own_text_behind(self.call, prompt, count, hidden, positions)


class EvictBySurprise(EvictByText):
    """Evict the keys of a prompt by how little its tokens were expected."""

    def read(self, evicted: PromptEviction) -> None:
        """Keep what was expected of every token."""
        prompt = evicted.prompt
        assert self.hidden is not None
        surprise = lookahead.surprise(prompt, self.hidden)
        for number, one in evicted.scores.waiting.items():
            at = (one.tokens.places.to(surprise.device) - prompt.seen).clamp(min=0)
            figures = surprise.gather(1, at).to(one.tokens.places.device)
            evicted.scores.reread[number] = figures[:, None].expand(-1, one.layer.keys.shape[1], -1)


class EvictByReread(EvictByText):
    """The text is the prompt once more; a policy observes the layers while they read it."""

    def read(self, evicted: PromptEviction) -> None:
        """Keep what the policy has observed."""
        places = evicted.tokens.of_layer(0, self.forward.device).places
        found = reread.read_again(self.call, evicted.prompt, self.stage.method, self.arguments, places)
        evicted.scores.reread = found


def hook_queries(plan: ModelPlan, hook: Callable[..., None]) -> None:
    """Show the policy of a prompt the queries, or the keys, of each layer before RoPE, if it looks at them."""
    if plan.policy is None:
        return

    def note(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if (evict := _evicting(plan)) is not None:
            setattr(evict, name, output.transpose(1, 2) if plan.family.heads_first else output)

    family, policy = plan.family, plan.policy.method
    if policy.choice("layer_budget")[0] == "squeeze":
        _hook_turns(plan, hook)
    for attention in map(family.attention_in, family.attending):
        if policy.future:
            hook(family.queries_in(attention).register_forward_hook(partial(note, "pre_rope")))
        if policy.needs_unrotated:
            hook(family.keys_in(attention).register_forward_hook(partial(note, "unrotated")))


def _evicting(plan: ModelPlan) -> EvictKeys | None:
    """The run that evicts keys of the prompt that is being read, or None."""
    call = current(plan)
    runs = None if call is None or call.observer is not None else call.text.runs
    return None if runs is None or not isinstance(runs.forward, Prompt) else runs.of(EvictKeys)


def _hook_turns(plan: ModelPlan, hook: Callable[..., None]) -> None:
    """Note how far the attention of each layer turns the hidden states of a prompt."""
    family = plan.family

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (evict := _evicting(plan)) is not None:
            evict.entering = args[0] if args else kwargs["hidden_states"]

    def leave(number: int, factor: float, module: nn.Module, args: Any, output: Any) -> None:
        if (evict := _evicting(plan)) is not None and evict.prompt is not None and evict.entering is not None:
            added = output[0] if isinstance(output, tuple) else output
            evict.prompt.note_turn(number, evict.entering, evict.entering + added * factor)
            evict.entering = None

    for number, place in enumerate(family.attending):
        layer = family.text.layers[place]
        norm = family.norm_in(layer)
        first = family.attention_in(place) if isinstance(norm, nn.Identity) else norm
        hook(first.register_forward_pre_hook(enter, with_kwargs=True))
        factor = getattr(layer, "residual_multiplier", 1.0)
        hook(family.attended_in(layer).register_forward_hook(partial(leave, number, factor)))
