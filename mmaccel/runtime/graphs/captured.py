"""Decode steps of ``generate`` that are captured: between two of them nothing moves and nothing grows, so that one graph does.

On a GPU they are recorded and replayed without being asked for (:mod:`.replay`); where the caller gives ``compile_config`` to
``generate``, on whatever device, they are compiled by ``torch.compile`` with that config. What a graph cannot do is done by an
ordinary step, and :meth:`mmaccel.core.stats.Stats.as_dict` says why. A recorded step is used only after it has repeated the
output of the step itself; ``docs/results/gpu.md`` has what GPUs said of them.

Where a draft is verified a step reads one token, or a block of :data:`BLOCK` whose last ones may be padding; what is rejected
is forgotten by counters on the device. No GPU has run steps of several tokens yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from mmaccel_kernels.decode import MAX_QUERIES
from torch import Tensor, nn

from ...core.stats import UNCAPTURED
from ...core.transformers_api import cache_in
from ...kv.cache import CacheState, state_of
from ...kv.decoding import on_gpu
from ...kv.merged_keys import MergedKeys
from ...kv.static_view import StaticView
from ..cache.packing import coming_unpacked
from ..cache.schedule import coming_kept, query_spec_of
from ..cache.sparse_read import pinned_reads, unpinnable
from ..call.call import Call, current
from ..call.plan import ModelPlan
from . import replay

Forward = Callable[..., Any]


@dataclass
class CapturedSteps:
    """The captured steps of one call.

    steps : by the number of their tokens, replays decode steps on the cache as it is pinned. idle : what the cache was pinned
        to until an ordinary step.
    """

    steps: dict[int, replay.ReplayedStep] = field(default_factory=dict)
    idle: StaticView | None = None

    @property
    def obstacle(self) -> str:
        """The reason why steps are run as they are; empty if they are not."""
        return next((step.obstacle for step in self.steps.values() if step.obstacle), "")


#: tokens that a cache is pinned for at once; more of them make fewer graphs, and attention reads them all
CHUNK = 512
#: tokens of a step that verifies a draft: as many as the kernel of decode attention reads at once
BLOCK = MAX_QUERIES
_NOTHING = "the cache holds no prompt that was reduced"


def may_capture(plan: ModelPlan, original: Callable[..., bool]) -> Callable[..., bool]:
    """``_valid_auto_compile_criteria`` of a model with ``plan``: whether steps of this call of ``generate`` may be captured."""

    @functools.wraps(original)
    def criteria(model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        call, compiled = current(plan), generation_config.compile_config is not None
        if call is None or not call.plan.active or not (compiled or replay.recordable(plan.family.model)):
            return original(model_kwargs, generation_config)
        if not call.inputs.block:
            # the cache is cropped behind candidates that nobody pads
            return False
        call.stats.uncaptured = obstacle(call.plan, generation_config, call.expected.new)
        return not call.stats.uncaptured

    return criteria


def obstacle(plan: ModelPlan, config: Any, new: int | None) -> str:
    """The reason why no step of a call that makes at most ``new`` tokens can be captured; empty if some may."""
    compiled = config.compile_config is not None
    if not (compiled or replay.recordable(plan.family.model)):
        return UNCAPTURED
    return _obstacle_in_call(plan, config) or ("" if compiled else _obstacle_to_replay(plan, new))


def captured_forward(plan: ModelPlan, original: Callable[..., Forward]) -> Callable[..., Forward]:
    """``get_compiled_call`` of a model with ``plan``: returns a function that captures the forward where it can, else runs the
    ordinary one."""

    @functools.wraps(original)
    def get_compiled_call(compile_config: Any) -> Forward:
        call, model = current(plan), plan.family.model
        if call is not None and not call.plan.active:
            return original(compile_config)
        compiled = None if compile_config is None else original(compile_config)

        def forward(*args: Any, **kwargs: Any) -> Any:
            call, ids, state = current(plan), kwargs.get("input_ids"), state_of(cache_in(kwargs))
            count = 0 if ids is None else ids.shape[1]
            if state is not None and call is not None and not args and count in (1, call.inputs.block):
                call.stats.uncaptured = _obstacle_in_cache(call.plan, state) or call.state(CapturedSteps).obstacle
                pinned = None if call.stats.uncaptured else _pinned(call.plan, call, state, count)
                if pinned is not None:
                    return _step(model, compiled, call, pinned, kwargs)
            if state is not None:
                _let_go(call, state)
            elif call is not None:
                call.stats.uncaptured = _NOTHING
            return model(*args, **kwargs)

        return forward

    return get_compiled_call


def _step(
    model: nn.Module, compiled: Forward | None, call: Call[ModelPlan], pinned: StaticView, kwargs: dict[str, Any]
) -> Any:
    """A captured step. Of the arguments of ``generate`` only the tokens differ from step to step."""
    ids, count = kwargs["input_ids"], kwargs["input_ids"].shape[1]
    with call.stats.clock.measure("decode", ids.device):
        if compiled is not None:
            call.stats.captured_steps += 1
            output = compiled(**_constant(kwargs), input_ids=ids)
        else:
            steps = call.state(CapturedSteps).steps
            if count not in steps or steps[count].pinned is not pinned:
                constant = _constant(kwargs)
                steps[count] = replay.ReplayedStep(pinned, ids, lambda tokens: model(**constant, input_ids=tokens))
            call.stats.captured_steps += steps[count].replays
            output = steps[count](ids)
    pinned.count_step(count)
    call.stats.decode_steps += 1
    return output


def _constant(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``generate`` that are the same in every step."""
    ids, given = kwargs["input_ids"], kwargs.get("position_ids")
    axes = given.shape[:1] if given is not None and given.dim() == 3 else ()
    # the text model takes positions from the pinned cache; these have its number of axes
    positions = ids.new_zeros(1).expand(*axes, *ids.shape)
    return {name: x for name, x in kwargs.items() if not isinstance(x, Tensor)} | {"position_ids": positions}


def _pinned(plan: ModelPlan, call: Call[ModelPlan], state: CacheState, count: int) -> StaticView | None:
    """The cache, pinned for the tokens that may still come in this call; None where a step of ``count`` tokens is an ordinary
    one. CUDA graphs may write to tensors that do not move."""
    if (pinned := state.shared.static_view) is not None and not pinned.full(count):
        return pinned
    _let_go(call, state)
    seen, policy = state.seen, None if plan.policy is None else plan.policy.method
    coming, unpacked = call.expected.after(seen), coming_unpacked(plan.token_groups, state.shared, seen)
    query_spec, kept = None, CHUNK
    if policy is not None and policy.scheduled:
        assert plan.family.query_heads is not None
        query_spec = query_spec_of(policy, plan.family.query_heads)
        kept = coming_kept(policy, state, query_spec)
    # with this token something may be packed or evicted, or it says whether text goes on behind a slow clip or its question
    if 0 in (unpacked, kept) or (state.positions.ahead is not None and not call.stats.decode_steps):
        return None
    reads = None
    if plan.reading is not None:
        # the first step makes the tensors that each of them carries to the next
        reads = pinned_reads(plan.reading.method, state.layers) if call.stats.decode_steps else None
        if reads is None:
            return None
    # behind the last token of a draft may be padding
    coming = CHUNK if coming is None else max(1, coming) + call.inputs.block - 1
    steps = min(CHUNK, coming, CHUNK if unpacked is None else unpacked, kept)
    steps_held = call.state(CapturedSteps)
    idle, steps_held.idle = steps_held.idle, None
    pinned = state.pin(steps, query_spec, idle, reads, call.inputs.block)
    if pinned is idle:
        return pinned
    if pinned.exclusive and steps == kept:
        # behind an eviction it is pinned to the same tensors again
        pinned.expected_steps = coming
    for x in pinned.tensors():
        # another cache, at other addresses, is no reason to compile anew
        torch._dynamo.mark_static_address(x, guard=False)
    return pinned


def _let_go(call: Call[ModelPlan] | None, state: CacheState) -> None:
    """Unpin the cache for an ordinary step. Behind it the cache may be pinned to the same tensors, which nobody else has
    seen."""
    pinned = state.shared.static_view
    if call is not None and pinned is not None:
        call.state(CapturedSteps).idle = pinned
    state.unpin()


def _known(hook: Any) -> bool:
    """Whether a hook has nothing to do in a captured step: ours, and those by which transformers collects hidden states."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] in ("mmaccel", "transformers")


def _obstacle_to_replay(plan: ModelPlan, new: int | None) -> str:
    """Why steps of a call cannot be recorded and replayed; empty if they can."""
    if new is not None and new < replay.LEAST:
        return f"fewer than {replay.LEAST} tokens may come, and recording a step costs a few of them"
    for name, module in plan.family.model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(map(_known, hooks)):
            return f"a replayed step would not call the hooks on {name or 'the model'}"
    return ""


def _obstacle_in_layers(plan: ModelPlan) -> str:
    """Why layers of a model cannot be pinned; empty if they can."""
    policy, family = plan.policy, plan.family
    if family.recurrent or family.latent:
        return f"the {'latents' if family.latent else 'recurrent states'} of {family.name} are not pinned"
    if family.masks_above:
        return f"{family.name} makes masks in front of its text model"
    if policy is not None and policy.method.scheduled and family.query_heads is None:
        return f"layers of {family.name} have different numbers of heads, whose queries {policy.method.name} remembers"
    return ""


def _obstacle_in_call(plan: ModelPlan, config: Any) -> str:
    """Why no step of a call can be captured; empty if some may."""
    policy, family = plan.policy, plan.family
    quantizer = getattr(family.model, "hf_quantizer", None)
    if plan.offload is not None:
        return "keys and values are in host memory, from where every step fetches them"
    if config.disable_compile:
        return "disable_compile was given"
    if config.output_attentions or config.output_hidden_states:
        return "attention weights or hidden states are asked for"
    if unpinned := _obstacle_in_layers(plan):
        return unpinned
    if plan.retracing is not None:
        return f"{plan.retracing.method.name} reads every step out between layers"
    if plan.skipping is not None:
        return f"{plan.skipping.method.name} chooses experts anew in every step"
    reads = plan.reading is not None
    if policy is not None and policy.method.decodes and not (policy.method.scheduled or reads):
        return f"{policy.method.name} looks at the cache at every step"
    if plan.reactivates:
        back = next(iter(plan.stage_at_layer.values())).method.name
        return f"with {back} as many tokens run in a step as come back in it"
    if reads and config.compile_config is not None and on_gpu(next(family.text.parameters())):
        return "torch.compile cannot follow the kernels that choose keys; leave out compile_config"
    if policy is not None and policy.method.every == 1 and not policy.method.growth and not policy.method.cap:
        return f"{policy.method.name} evicts at every step; give every=16 for fifteen of sixteen that can be captured"
    # on a GPU a pinned cache is read by a kernel of ours
    if family.text.config._attn_implementation != "mmaccel_text_sdpa" and not on_gpu(next(family.text.parameters())):
        return "only sdpa attention can be captured here"
    if len({parameter.device for parameter in family.model.parameters()}) > 1:
        return "the model is spread over several devices"
    if quantizer is not None and not quantizer.is_compileable:
        return "the model's quantisation cannot be compiled"
    return ""


def _obstacle_in_cache(plan: ModelPlan, state: CacheState) -> str:
    """Why a step on this cache cannot be captured; empty if it can."""
    if state.shared.static_view is not None:
        return ""
    if state.positions.offset is None or any(layer.empty for layer in state.layers):
        return _NOTHING
    if any(layer.prefix is not None for layer in state.layers):
        return "rows share a prefix, which captured steps would copy"
    if plan.policy is not None and plan.policy.method.needs_separators and plan.policy.method.scheduled:
        return f"{plan.policy.method.name} looks at every token"
    if plan.policy is not None and (plan.policy.method.extends or plan.policy.method.stretch != 1):
        return f"{plan.policy.method.name} turns queries by positions of its own"
    if state.positions.axes_ahead is not None:
        return "behind a prompt that ends in a picture every axis of positions goes on from its own end"
    if MergedKeys in state.shared.memories:
        return "keys that others were merged into have weights of their own"
    if state.shared.places.first_weights is not None:
        return "tokens have other weights in the first layer"
    if state.shared.places.weights is not None and plan.family.text.config._attn_implementation != "mmaccel_text_sdpa":
        return "tokens have weights, which captured steps have only with sdpa attention"
    return "" if plan.reading is None else unpinnable(plan.reading.method, state.layers)
