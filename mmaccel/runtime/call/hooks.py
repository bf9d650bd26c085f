"""Hooks on the text model and its layers: every family ends in one call of its text model, and there prompts are reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...core.layout import Layout
from ...core.reduction import Reduction
from ...core.transformers_api import DynamicCache, cache_argument, cache_in, cache_names, cache_of
from ...errors import UnsupportedError
from ...kv.cache import CacheState, adopt, check_plain, state_of, static_view_of
from ...kv.forward_info import ForwardInfo
from ...kv.merged_keys import MergedKeys
from .call import Call, current
from .forward import Continuation, Forward, Prompt, PromptResult, rows_at, to_device_packed
from .indexers import hook_indexers
from .plan import ModelPlan
from .runs import Run, Runs, TextInputs
from .split_prefill import no_cache

#: the runs of one forward of a call, see :mod:`mmaccel.runtime.build`
MakeRuns = Callable[[Call[ModelPlan], Forward], Iterable[Run]]


def in_training(model: nn.Module) -> str:
    """Message that refuses a model in training mode, in which some loaders return it."""
    return f"{type(model).__name__} is in training mode, and mmaccel accelerates inference; call model.eval() first."


class TextHooks:
    """The hooks on the text model of one accelerated model.

    make_runs : the work of the plan's stages in one forward.
    check : raises when something that acceleration needs is no longer there; called before every forward.
    hook : takes the handle of every hook as soon as it is registered, so that all can be removed whatever fails.
    """

    def __init__(
        self, plan: ModelPlan, make_runs: MakeRuns, check: Callable[[], None], hook: Callable[..., None]
    ) -> None:
        self.plan, self.make_runs, self.check = plan, make_runs, check
        text = plan.family.text
        self.layers = list(text.layers)
        hook(text.register_forward_pre_hook(self.enter, with_kwargs=True))
        hook(text.register_forward_hook(self.leave, with_kwargs=True, always_call=True))
        if plan.key_biases:
            hook(text.rotary_emb.register_forward_hook(self.note_rotations, with_kwargs=True))
        hook_indexers(plan, hook)
        for number in range(plan.first_inside, len(self.layers)):
            before = functools.partial(self.before_layer, number)
            hook(self.layers[number].register_forward_pre_hook(before, with_kwargs=True))

    def note_rotations(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Note the cosines and sines of the tokens that enter the layers."""
        call = current(self.plan)
        if call is None or call.observer is not None or call.text.runs is None:
            return

        def before(count: int, first: Tensor) -> tuple[Tensor, Tensor]:
            """Cosines and sines of so many tokens before the ``first [B]``, which have no pictures among them."""
            given = dict(zip(("x", "position_ids"), args, strict=False)) | kwargs
            positions = given["position_ids"]
            positions = positions.expand(*positions.shape[:-2], len(first), -1)
            at = first.to(positions.device).expand(positions.shape[:-1])[..., None]
            back = torch.arange(count, 0, -1, device=positions.device)
            turned: tuple[Tensor, Tensor] = module.forward(given["x"], positions.gather(-1, at) - back)
            return turned

        call.text.runs.note_rotations(output[0], output[1], before)

    # --- into the text model ----------------------------------------------------------------------------------
    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Reduce a prompt, or continue a cache that was reduced; anything else passes through untouched."""
        if (pinned := static_view_of(kwargs)) is not None:
            count = kwargs["inputs_embeds"].shape[1]
            pinned.begin_step(count)
            # a mask of four axes is passed on as it is
            return args, {
                **kwargs,
                "position_ids": pinned.positions_of(count, kwargs.get("position_ids")),
                "attention_mask": pinned.mask,
            }
        call = current(self.plan)
        if call is None or call.observer is not None:
            return None
        call.text.runs = None
        embeds, cache = kwargs.get("inputs_embeds"), cache_in(kwargs)
        if embeds is None:
            return None
        state = state_of(cache)
        call.cache = cache if cache is not None else call.cache
        given_ids, ids = call.inputs.input_ids, self._prompt_ids(call, embeds, state)
        call.text.timer = call.stats.clock.start(embeds.device), "prefill" if embeds.shape[1] > 1 else "decode"
        # a prompt without pictures is shaped where it is read in chunks
        if not call.plan.active or (ids is None and state is None and not call.plan.splits(embeds.shape[1])):
            return None
        self._check(call, cache, state)
        kwargs = dict(kwargs)
        if self.plan.family.masks_above:
            # the given mask was computed from this one, which still tells padding
            kwargs["attention_mask"] = call.inputs.mask
        seen = cache.get_seq_length() if cache is not None else 0
        valid = _valid(kwargs.get("attention_mask"), embeds, seen)
        if state is None:
            state = self._adopt(kwargs, seen)
        if ids is not None:
            forward: Forward = self._prompt(call, kwargs, ids, valid, state, seen)
        else:
            forward = _continuation(call, state, _incoming(call, state, seen, embeds), embeds.device, given_ids)
        call.text.runs = runs = Runs(forward, self.make_runs(call, forward))
        if ids is None:
            incoming = forward.incoming
            plain = incoming.weights is None and incoming.merged is None and not self.plan.family.latent
            incoming.as_stored = not runs.read_keys and plain
        runs.before_text(TextInputs(kwargs, valid, call.generating and not call.text.forwards))
        kwargs["attention_mask"] = self.plan.family.mask_argument(forward.real)
        if state is not None:
            state.shared.incoming = forward.incoming
        return args, kwargs

    def _check(self, call: Call[ModelPlan], cache: Any, state: CacheState | None) -> None:
        """Raise where mmaccel cannot shape this forward."""
        if self.plan.family.model.training:
            raise UnsupportedError(in_training(self.plan.family.model))
        self.check()
        if cache is None:
            return
        if state is None:
            check_plain(cache)
        elif cache.layers != state.every:
            raise UnsupportedError(
                "The layers of this cache were exchanged after mmaccel reduced its prompt; start again with a new cache."
            )
        elif state.shared.places.weights is not None and (call.plan.policy or call.plan.token_groups):
            raise UnsupportedError(
                f"This cache has tokens with weights (proportional attention), which recipe {call.plan.recipe.name!r} cannot "
                "compress; start again with a new cache."
            )

    def _prompt_ids(self, call: Call[ModelPlan], embeds: Tensor, state: CacheState | None) -> Tensor | None:
        """The ids ``[B, S]`` on the CPU of a prompt that has pictures, else None. Counts the new tokens."""
        ids, call.inputs.input_ids = call.inputs.input_ids, None
        batch, length = embeds.shape[:2]
        # one new token is a decode step; looking for placeholders in it would cost every step
        prefill = length > 1
        if prefill and not call.text.forwards:
            seen, given = 0 if call.cache is None else call.cache.get_seq_length(), call.inputs.given_length
            # the first candidates of a draft may follow a prompt
            drafted = 0 if given is None else max(0, seen + length - given)
            call.stats.prompt_tokens += batch * (length - drafted if drafted < length else length)
        else:
            # candidates of a draft are several tokens
            (call.text.counted or call.stats).decode_steps += 1
        # a candidate of prompt lookup may repeat a placeholder, when the pictures of this call are in the cache already
        guessed = call.generating and state is not None and call.result is not None
        if not prefill or guessed or ids is None or ids.shape != embeds.shape[:2]:
            return None
        ids = ids.cpu()
        if not _count(call, ids):
            return None
        self._note_pictures(call, ids)
        return ids

    def _note_pictures(self, call: Call[ModelPlan], ids: Tensor) -> None:
        """Note the methods of the recipe that had nothing to choose from, where the prompt ``ids [B, S]`` has pictures."""
        if not call.plan.choosers:
            return
        try:
            segments = _layout(call, ids, torch.ones_like(ids, dtype=torch.bool)).segments
        except UnsupportedError:
            # prompts without a layout cannot be reduced either, and are refused where that matters
            return
        clips = {s.picture for s in segments if s.modality == "video" or bool((s.tile.cells[:, 0] > 0).any())}
        if any(s.picture not in clips for s in segments):
            left = "chooses frames of clips, and left pictures as they are"
            call.stats.notes += [f"{name} {left}" for name in call.plan.choosers]

    def _adopt(self, kwargs: dict[str, Any], seen: int) -> CacheState | None:
        """The state of the call's cache, which is created if the call has none; None with ``use_cache=False``."""
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
        state = adopt(cache, len(self.layers), valid, self.plan.family.recurrent, self.plan.family.latent)
        if (offset := state.positions.offset) is not None:
            state.positions.offset = offset - self.plan.family.first_position
        return state

    def _prompt(
        self,
        call: Call[ModelPlan],
        kwargs: dict[str, Any],
        ids: Tensor,
        valid: Tensor | None,
        state: CacheState | None,
        seen: int,
    ) -> Prompt:
        """A prompt with pictures, before anything is reduced."""
        embeds, plan = kwargs["inputs_embeds"], call.plan
        valid = torch.ones(embeds.shape[:2], dtype=torch.bool) if valid is None else valid
        layout = _layout(call, ids, valid)
        incoming = _incoming(call, state, seen, embeds)
        if plan.stores_anew:
            incoming.expected_new_tokens = 0
        result = PromptResult(layout, Reduction.identity(layout.valid))
        groups = plan.family.bidirectional_groups(ids, layout.valid, call.inputs.extra, seen)
        return Prompt(plan, call.stats, state, incoming, embeds.device, result, ids, groups)

    # --- between layers ---------------------------------------------------------------------------------------
    def before_layer(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a layer the input and the arguments of the tokens that are left."""
        call = current(self.plan)
        runs = None if call is None or call.observer is not None else call.text.runs
        if runs is None or not runs.between_layers:
            return None
        hidden = runs.before_layer(number, args[0] if args else kwargs["hidden_states"], kwargs)
        kwargs = runs.forward.layer_arguments(number, kwargs)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    # --- out of the text model --------------------------------------------------------------------------------
    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Give the caller the length that was asked for, and complete the statistics."""
        if (pinned := static_view_of(kwargs)) is not None:
            pinned.end_step(kwargs["inputs_embeds"].shape[1])
            return None
        call = current(self.plan)
        if call is None or call.observer is not None:
            return None
        try:
            return self._leave(call, output)
        finally:
            call.end_forward()

    def _leave(self, call: Call[ModelPlan], output: Any) -> Any:
        runs = call.text.runs
        if runs is not None and output is not None:
            runs.finish(output.last_hidden_state)
        call.text.runs = None
        if call.text.timer is not None:
            call.stats.clock.stop(call.text.timer[1], call.text.timer[0])
            call.text.timer = None
        if runs is not None:
            runs.finalize(whole=output is not None)
        if output is None:
            return None
        cache = cache_of(output)
        call.cache = cache if cache is not None else call.cache
        if runs is None:
            return None
        if runs.attended != (attending := len(self.plan.family.attending) * runs.pieces):
            raise UnsupportedError(
                f"mmaccel saw the attention of {runs.attended} of {attending} layers, so this result is wrong: "
                "something replaced the attention function of the model (other kernels, a patched forward); undo that, or "
                "call model.mmaccel.remove() first."
            )
        forward = runs.forward
        if isinstance(forward, Prompt):
            call.result = forward.result
            if not call.generating:
                output.last_hidden_state = _widen(call, forward, output.last_hidden_state)
            return output
        if output.last_hidden_state.shape[1] == forward.length:
            return None
        # tokens that came back are stored, and their outputs are not needed
        output.last_hidden_state = output.last_hidden_state[:, -forward.length :]
        return output


def _count(call: Call[ModelPlan], ids: Tensor) -> bool:
    """Count the visual tokens and sounds of a prompt ``ids [B, S]``; whether it has any that the recipe works on."""
    family = call.plan.family
    visual, heard = int(family.visual(ids).sum()), int(family.heard(ids).sum()) if family.hears else 0
    call.stats.visual_tokens += visual
    call.stats.sound_tokens += heard
    return visual > 0 or (heard > 0 and call.plan.hears)


def _incoming(call: Call[ModelPlan], state: CacheState | None, seen: int, embeds: Tensor) -> ForwardInfo:
    """A forward of ``embeds [B, S, d]`` behind ``seen`` tokens, as the cache sees it."""
    end = seen + embeds.shape[1]
    incoming = ForwardInfo(seen, embeds.shape[1], as_stored=False, expected_new_tokens=call.expected.after(end))
    if state is not None:
        incoming.weights, incoming.first_weights = state.shared.places.weights, state.shared.places.first_weights
        if MergedKeys in state.shared.memories:
            incoming.merged = state.shared.memory(MergedKeys)
    return incoming


def _continuation(
    call: Call[ModelPlan],
    state: CacheState | None,
    incoming: ForwardInfo,
    device: torch.device,
    ids: Tensor | None,
) -> Continuation:
    """New tokens without pictures."""
    if state is None:
        raise no_cache(call.plan.recipe.chunk)
    return Continuation(call.plan, call.stats, state, incoming, device, ids)


def _widen(call: Call[ModelPlan], prompt: Prompt, hidden: Tensor) -> Tensor:
    """Back to the caller's length: zero where there was no token, NaN where one was dropped.

    Where a head follows, its logits get their NaN from :func:`show_dropped`: here it would reach the gradient of the head's
    weights.
    """
    total = prompt.total
    lost = total.valid & ~total.kept
    slots, kept, dropped = to_device_packed(hidden.device, prompt.slots(prompt.chosen), total.kept, lost)
    wide = rows_at(hidden, slots).masked_fill(~kept.bool()[..., None], 0.0)
    if call.inputs.opened_by is prompt.plan.family.model:
        call.text.dropped = dropped.bool()
    else:
        wide = wide.masked_fill(dropped.bool()[..., None], torch.nan)
    if (labels := call.inputs.labels) is not None:
        # a row predicts the label behind it
        ignored = pad(lost[:, :-1], (1, 0)).to(labels.device) & (labels != -100)
        call.stats.labels_ignored += int(ignored.sum())
        labels.masked_fill_(ignored, -100)
    return wide


def _layout(call: Call[ModelPlan], ids: Tensor, valid: Tensor) -> Layout:
    """The layout of a prompt ``ids [B, S]`` on the CPU."""
    for output in call.vision.outputs.values():
        output.arguments.update(call.inputs.extra)
    return call.plan.family.layout(ids, valid, call.vision.outputs)


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
