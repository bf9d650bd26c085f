"""Hooks on the text model and its layers: every family ends in one call of its text model, and there prompts are reduced.

:class:`TextHooks` reads what comes in, lets the stages reduce it, and writes what is left into the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Layout
from ...core.precision import without_autocast
from ...core.reduction import Reduction
from ...errors import UnsupportedError
from ...kv.cache import CacheState, adopt, check_plain, pinned_of, state_of
from ...kv.incoming import Incoming
from ...method import DraftPolicy, ReadingPolicy, ReturningMethod
from ...method.results import figures_of
from ...transformers_api import DynamicCache, cache_argument, cache_in, cache_names, cache_of
from ..layers import chunked_prefill as chunks
from ..layers import reactivation as returning
from ..prompt import continuation, lookahead, proportional, tokens
from ..prompt import reduce as prefill
from ..tower.taps import Taps
from .call import Scope, current
from .forward import Continuation, Forward, Prompt, chosen_of, rows_at, sent
from .plan import ModelPlan
from .runs import Stages


def in_training(model: nn.Module) -> str:
    """Why a call is refused of a model in training mode, in which some loaders hand it over."""
    return f"{type(model).__name__} is in training mode, and mmaccel accelerates inference; call model.eval() first."


class TextHooks:
    """The hooks on the text model of one accelerated model.

    Parameters
    ----------
    check : raises when something that acceleration needs is no longer there; called before every forward.
    hook : takes the handle of every hook as soon as it is registered, so that all can be removed whatever fails.
    """

    def __init__(self, plan: ModelPlan, taps: Taps, check: Callable[[], None], hook: Callable[..., None]) -> None:
        self.plan, self.taps, self.check = plan, taps, check
        text = plan.family.text
        self.layers = list(text.layers)
        hook(text.register_forward_pre_hook(self.enter, with_kwargs=True))
        hook(text.register_forward_hook(self.leave, with_kwargs=True, always_call=True))
        for number in range(plan.first_inside, len(self.layers)):
            hook(self.layers[number].register_forward_pre_hook(self._layer(number), with_kwargs=True))
        if plan.policy is not None and plan.policy.method.future:
            for attention in map(plan.family.attention_in, plan.family.attending):
                hook(plan.family.queries_in(attention).register_forward_hook(self._note_queries))

    # --- into the text model ----------------------------------------------------------------------------------
    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Reduce, or continue a cache that was reduced; anything else passes through untouched."""
        if (pinned := pinned_of(kwargs)) is not None:
            pinned.begin()
            # a mask of four axes is passed on as it is
            return args, {
                **kwargs,
                "position_ids": pinned.positions_like(kwargs.get("position_ids")),
                "attention_mask": pinned.mask,
            }
        scope = current(self.plan)
        if scope is None or scope.preview is not None:
            return None
        scope.stages = None
        embeds, cache = kwargs.get("inputs_embeds"), cache_in(kwargs)
        if embeds is None:
            return None
        state = state_of(cache)
        scope.cache = cache if cache is not None else scope.cache
        ids = self._prompt_ids(scope, embeds, state)
        scope.timer = scope.stats.clock.start(embeds.device), "prefill" if embeds.shape[1] > 1 else "decode"
        if not scope.plan.active or (ids is None and state is None):
            return None
        if self.plan.family.model.training:
            raise UnsupportedError(in_training(self.plan.family.model))
        self.check()
        if cache is not None and state is not None and cache.layers != state.every:
            raise UnsupportedError(
                "The layers of this cache were exchanged after mmaccel reduced its prompt; start again with a new cache."
            )
        kwargs = dict(kwargs)
        if self.plan.family.masks_above:
            # what is given was made of this one, which still says what is padding
            kwargs["attention_mask"] = scope.mask
        if state is not None and state.shared.weights is not None and (scope.plan.policy or scope.plan.token_groups):
            raise UnsupportedError(
                f"This cache has tokens with weights (proportional attention), which recipe {scope.plan.recipe.name!r} cannot "
                "compress; start again with a new cache."
            )
        seen = cache.get_seq_length() if cache is not None else 0
        if cache is not None and state is None:
            check_plain(cache)
        valid = _valid(kwargs.get("attention_mask"), embeds, seen)
        if ids is not None:
            state = self._adopt(kwargs, seen) if state is None else state
            forward: Forward = self._prefill(scope, kwargs, ids, valid, state, seen)
        elif state is not None:
            forward = self._continue(scope, kwargs, valid, state, seen)
        kwargs["attention_mask"] = self.plan.family.mask_argument(forward.real)
        if state is not None:
            state.shared.incoming = forward.incoming
        return args, kwargs

    def _prompt_ids(self, scope: Scope[ModelPlan], embeds: Tensor, state: CacheState | None) -> Tensor | None:
        """The ids ``[B, S]`` on the CPU of a prompt that has pictures; None of anything else. Counts what comes in."""
        ids, scope.input_ids = scope.input_ids, None
        batch, length = embeds.shape[:2]
        # one new token is a decode step; looking for placeholders in it would cost every step
        prefill = length > 1
        if prefill and not scope.forwards:
            seen = 0 if scope.cache is None else scope.cache.get_seq_length()
            # the first candidates of a draft may stand behind a prompt
            drafted = 0 if scope.given_length is None else max(0, seen + length - scope.given_length)
            scope.stats.prompt_tokens += batch * (length - drafted if drafted < length else length)
        else:
            # candidates of a draft are several tokens
            (scope.figures or scope.stats).decode_steps += 1
        # a candidate of prompt lookup may repeat a placeholder, when the pictures of this call are in the cache already
        guessed = scope.generating and state is not None and scope.layout is not None
        if not prefill or guessed or ids is None or ids.shape != embeds.shape[:2]:
            return None
        ids = ids.cpu()
        visual = int(scope.plan.family.visual(ids).sum())
        scope.stats.visual_tokens += visual
        if not visual:
            return None
        self._note_pictures(scope, ids)
        return ids

    def _note_pictures(self, scope: Scope[ModelPlan], ids: Tensor) -> None:
        """Say which methods of the recipe had nothing to choose from, where the prompt ``ids [B, S]`` has pictures."""
        if not scope.plan.choosers:
            return
        try:
            segments = _layout(scope, ids, torch.ones_like(ids, dtype=torch.bool)).segments
        except UnsupportedError:
            # what cannot be laid out cannot be reduced either, and is refused where that matters
            return
        clips = {s.picture for s in segments if s.modality == "video" or bool((s.tile.cells[:, 0] > 0).any())}
        if any(s.picture not in clips for s in segments):
            left = "chooses frames of clips, and left pictures as they are"
            scope.stats.notes += [f"{name} {left}" for name in scope.plan.choosers]

    def _adopt(self, kwargs: dict[str, Any], seen: int) -> CacheState | None:
        """The state of the call's cache, which is made here if the call has none; None if it is to have none."""
        cache, use = cache_in(kwargs), kwargs.get("use_cache")
        config = self.plan.family.text.config
        if cache is None:
            if not (config.use_cache if use is None else use):
                self.plan.check_cache(False)
                return None
            cache = DynamicCache(config=config)
            # of two names transformers drops the older one, with a warning at every call
            for name in cache_names():
                kwargs.pop(name, None)
            kwargs |= cache_argument(cache)
        mask = kwargs.get("attention_mask")
        valid = mask[:, :seen].bool() if mask is not None and seen else None
        state = adopt(cache, len(self.layers), valid, self.plan.family.recurrent)
        if state.offset is not None:
            state.offset = state.offset - self.plan.family.first_position
        return state

    def _prefill(
        self,
        scope: Scope[ModelPlan],
        kwargs: dict[str, Any],
        ids: Tensor,
        valid: Tensor | None,
        state: CacheState | None,
        seen: int,
    ) -> Prompt:
        """A prompt with pictures: read, reduce, write."""
        embeds, plan = kwargs["inputs_embeds"], scope.plan
        valid = torch.ones(embeds.shape[:2], dtype=torch.bool) if valid is None else valid
        layout = _layout(scope, ids, valid)
        coming = scope.coming(seen + embeds.shape[1])
        if plan.policy is not None or plan.token_groups or plan.chunks is not None:
            # what is stored of a prompt is stored anew at once
            coming = 0
        incoming = Incoming(seen, embeds.shape[1], as_stored=False, coming=coming)
        prompt = Prompt(
            plan,
            scope.stats,
            state,
            incoming,
            embeds.device,
            layout,
            ids,
            scope.encoded,
            Reduction.identity(layout.valid),
            together=plan.family.bidirectional_groups(ids, layout.valid, scope.beside, seen),
        )
        returning.check_rows(prompt)
        embeds, planes = prefill.reduce(prompt, self.taps, kwargs, scope)
        with without_autocast(embeds.device):
            # from here on the cache is changed
            if state is not None:
                prompt.first_time = state.shared.note_pictures(layout.visual, seen)
            scope.stages = Stages(prompt)
            if scope.stages.packing is not None:
                scope.stages.packing.note_prompt(prompt, embeds)
            proportional.weigh(prompt, embeds, planes)
            prefill.write(prompt, embeds, planes, kwargs)
            tokens.prepare(prompt, kwargs["inputs_embeds"])
        return prompt

    def _continue(
        self, scope: Scope[ModelPlan], kwargs: dict[str, Any], valid: Tensor | None, state: CacheState, seen: int
    ) -> Continuation:
        """New tokens without pictures on a reduced cache."""
        embeds, policy = kwargs["inputs_embeds"], scope.plan.policy
        method = None if policy is None else policy.method
        looks = method is not None and method.recalls and not (isinstance(method, ReadingPolicy) and method.summarises)
        length, returns, weights = embeds.shape[1], returning.may(scope.plan, state), state.shared.weights
        as_stored = not (looks or returns) and weights is None
        incoming = Incoming(seen, length, as_stored, weights=weights, coming=scope.coming(seen + length))
        forward = Continuation(scope.plan, scope.stats, state, incoming, embeds.device, returns)
        # from here on the cache is changed
        scope.stages = Stages(forward)
        continuation.write(forward, state, valid, kwargs, scope.generating and not scope.forwards)
        return forward

    # --- between layers ---------------------------------------------------------------------------------------
    def _layer(self, number: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            forward = self._forward()
            hidden = args[0] if args else kwargs["hidden_states"]
            if isinstance(forward, Prompt):
                hidden, kwargs = self._layer_of_prompt(forward, number, hidden, kwargs)
            elif isinstance(forward, Continuation) and forward.returns:
                if (stage := forward.plan.stage_at_layer.get(number)) is not None:
                    with without_autocast(hidden.device):
                        hidden = returning.come_back(forward, stage.method, number, hidden, kwargs)
                kwargs = {**kwargs, **forward.arguments}
            else:
                return None
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": hidden}

        return hook

    def _forward(self) -> Forward | None:
        """The forward of the text model that is being run, if mmaccel shapes it."""
        scope = current(self.plan)
        return scope.stages.forward if scope is not None and scope.stages is not None else None

    def _layer_of_prompt(
        self, prompt: Prompt, number: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """What layer ``number`` is given of a prompt: its input, and its other arguments."""
        stage = prompt.plan.stage_at_layer.get(number)
        if stage is not None and not tokens.rests(prompt, stage):
            with prompt.measured("selection", hidden.device):
                if stage.method.looks_ahead:
                    self._look_ahead(prompt, number, hidden, kwargs)
                hidden = self._reduce(prompt, number, hidden, kwargs)
        if prompt.chunked is not None and prompt.chunked.due(number):
            with prompt.measured("selection", hidden.device):
                with without_autocast(hidden.device):
                    hidden = chunks.join(prompt, number, hidden, {**kwargs, **prompt.arguments[-1]})
        kwargs = self._arguments(prompt, number, kwargs)
        if number in prompt.plan.family.recurrent:
            kwargs["attention_mask"] = prompt.real
        return hidden, kwargs

    def _arguments(self, prompt: Prompt, number: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those of a layer, of the tokens that are left."""
        made, phase = {**kwargs, **prompt.arguments[-1]}, len(prompt.arguments) - 1
        kind = prompt.plan.family.rope_kind(number)
        if kind is not None and phase:
            # layers of every kind are given those of all tokens that entered the language model
            if (phase, kind) not in prompt.turned:
                given = kwargs["position_embeddings"]
                slots = prompt.slots(chosen_of(prompt.incoming.phases[0][1]))
                (at,) = sent(given[0].device, slots.gather(1, prompt.chosen.clamp(min=0)))
                prompt.turned[phase, kind] = tuple(rows_at(x.expand(len(at), -1, -1), at) for x in given)
            made["position_embeddings"] = prompt.turned[phase, kind]
        return made

    def _look_ahead(self, prompt: Prompt, number: int, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """Show the method at layer ``number`` what this layer is about to attend to."""
        scope, layer = current(self.plan), self.layers[number]
        assert scope is not None
        attention = lookahead.own_attention(
            scope, prompt, number, layer, hidden, self._arguments(prompt, number, kwargs)
        )
        with without_autocast(hidden.device):
            prompt.looked = figures_of(prompt.plan.stage_at_layer[number].method, attention)

    def _reduce(self, prompt: Prompt, number: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Run the method at layer ``number``: the tokens it drops are gone from here on."""
        slots, stage = prompt.slots(prompt.chosen), prompt.plan.stage_at_layer[number]
        made = tokens.reduce(prompt, stage, self.taps, hidden, slots, number)
        previous = {**kwargs, **prompt.arguments[-1]}
        if isinstance(stage.method, ReturningMethod):
            returning.set_aside(prompt, number, made, hidden, slots, previous)
        if made.is_identity:
            return hidden
        chosen, padded = prompt.compacted(made.kept)
        slots, places = sent(hidden.device, slots, chosen.clamp(min=0))
        at = slots.gather(1, places)
        arguments: dict[str, Any] = {}
        several = prompt.plan.family.rope_kind(number) is not None
        if previous.get("position_embeddings") is not None and not several:
            arguments["position_embeddings"] = tuple(
                rows_at(x.expand(len(hidden), -1, -1), at) for x in previous["position_embeddings"]
            )
        if isinstance(previous.get("position_ids"), Tensor):
            positions = previous["position_ids"]
            # GLM-4.5V shows its layers all three axes
            axes = positions.shape[:-2]
            there = at.to(positions.device).expand(*axes, -1, -1)
            arguments["position_ids"] = positions.expand(*axes, len(hidden), -1).gather(-1, there)
        prompt.begin(number, chosen, padded, hidden.device, **arguments)
        counted = prompt.stats.layer_tokens
        left = int((made.kept & prompt.layout.visual).sum())
        counted[number:] = [left] * (len(counted) - number)
        if made.links is None:
            return rows_at(hidden, at)
        # merged where the tokens stand in the prompt; what stands at places that are gone is not looked at
        return rows_at(made.substitute(rows_at(hidden, slots)), places)

    def _note_queries(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Show the cache stage of a prompt the queries of a layer before RoPE."""
        scope = current(self.plan)
        stages = scope.stages if scope is not None else None
        if stages is not None and stages.eviction is not None and isinstance(stages.forward, Prompt):
            stages.eviction.pre_rope = output

    # --- out of the text model --------------------------------------------------------------------------------
    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Give the caller the length that was asked for, and settle the statistics."""
        if (pinned := pinned_of(kwargs)) is not None:
            pinned.end()
            return None
        scope = current(self.plan)
        if scope is None or scope.preview is not None:
            return None
        try:
            return self._leave(scope, kwargs, output)
        finally:
            scope.end_forward()

    def _leave(self, scope: Scope[ModelPlan], kwargs: dict[str, Any], output: Any) -> Any:
        stages = scope.stages
        if stages is not None and output is not None:
            self._look_behind(scope, stages, kwargs)
            stages.finish()
        scope.stages = None
        if scope.timer is not None:
            scope.stats.clock.stop(scope.timer[1], scope.timer[0])
            scope.timer = None
        if stages is not None and stages.forward.state is not None:
            stages.forward.state.settle(whole=output is not None)
        if output is None:
            return None
        cache = cache_of(output)
        scope.cache = cache if cache is not None else scope.cache
        if stages is None:
            return None
        if stages.attended != (attending := len(self.plan.family.attending)):
            raise UnsupportedError(
                f"mmaccel saw the attention of {stages.attended} of {attending} layers, so this result is wrong: "
                "something replaced the attention function of the model (other kernels, a patched forward); undo that, or "
                "call model.mmaccel.remove() first."
            )
        prompt = stages.forward
        if isinstance(prompt, Continuation) and prompt.back is not None:
            # those that came back are stored, and nobody asks what follows them
            output.last_hidden_state = output.last_hidden_state[:, -prompt.length :]
            return output
        if not isinstance(prompt, Prompt):
            return None
        scope.layout, scope.reduction, scope.history = prompt.layout, prompt.total, prompt.history
        stages.record()
        if not scope.generating:
            output.last_hidden_state = self._widen(scope, prompt, output.last_hidden_state)
        return output

    def _look_behind(self, scope: Scope[ModelPlan], stages: Stages, kwargs: dict[str, Any]) -> None:
        """Show a policy that scores by the text of a draft what the layers make of it behind a prompt."""
        forward, stage = stages.forward, scope.plan.policy
        if stage is None or not isinstance(stage.method, DraftPolicy) or not isinstance(forward, Prompt):
            return
        assert stages.eviction is not None and stages.eviction.prompt is not None
        with forward.measured("selection", forward.device):
            found = lookahead.text_behind(scope, forward, stage, kwargs.get("position_ids"))  # type: ignore[arg-type]
        stages.eviction.prompt.behind = found

    def _widen(self, scope: Scope[ModelPlan], prompt: Prompt, hidden: Tensor) -> Tensor:
        """Back to the caller's length: zero where there was no token, NaN where one was dropped.

        Where a head follows, its logits are given their NaN by :func:`show_dropped`: here it would reach the gradient of the
        head's weights.
        """
        total = prompt.total
        dropped = total.valid & ~total.kept
        slots, kept, gone = sent(hidden.device, prompt.slots(prompt.chosen), total.kept, dropped)
        wide = rows_at(hidden, slots).masked_fill(~kept.bool()[..., None], 0.0)
        if scope.opened_by is self.plan.family.model:
            scope.dropped = gone.bool()
        else:
            wide = wide.masked_fill(gone.bool()[..., None], torch.nan)
        if (labels := scope.labels) is not None:
            # a row predicts the label behind it
            lost = torch.zeros_like(labels, dtype=torch.bool)
            lost[:, 1:] = dropped[:, :-1].to(labels.device)
            lost &= labels != -100
            scope.stats.labels_ignored += int(lost.sum())
            labels.masked_fill_(lost, -100)
        return wide


def _layout(scope: Scope[ModelPlan], ids: Tensor, valid: Tensor) -> Layout:
    """Of a prompt ``ids [B, S]`` on the CPU, see :meth:`mmaccel.families.Family.layout`."""
    for seen in scope.encoded.values():
        seen.arguments.update(scope.beside)
    return scope.plan.family.layout(ids, valid, scope.encoded)


def _valid(mask: Any, embeds: Tensor, seen: int) -> Tensor | None:
    """``[B, q]`` bool of the new tokens, on the CPU, or None if none is padding; a single new token never is."""
    if mask is None or (seen and embeds.shape[1] == 1):
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UnsupportedError("mmaccel needs the 2-D attention mask of the processor, not a prepared 4-D one.")
    new = mask[:, -embeds.shape[1] :].bool().cpu()
    return None if bool(new.all()) else new


def show_dropped(logits: Tensor, dropped: Tensor, kept: int | Tensor) -> Tensor:
    """``logits [B, n, V]`` with NaN where a token was ``dropped [B, S]``.

    ``kept`` says which of the ``S`` places have logits, as ``logits_to_keep`` of transformers does.
    """
    rows = dropped[:, -kept or None :] if isinstance(kept, int) else dropped[:, kept.to(dropped.device)]
    fill = logits.masked_fill if logits.requires_grad else logits.masked_fill_
    return fill(rows.to(logits.device)[..., None], torch.nan)
