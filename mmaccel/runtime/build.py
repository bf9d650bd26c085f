"""From a recipe to its plan on one model, and from the plan to the runs of one forward.

This is the one place that asks which kind a method is: :func:`plan_model` sorts the stages of a recipe by their kinds, and
:func:`make_runs` makes the run of every mechanism that a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import MmaccelError, UnsupportedError
from ..families import Family
from ..families.draft import load_draft
from ..families.text import TextTower
from ..families.tower import Towers
from ..kv.cache import CacheState
from ..kv.codecs import Codec, token_groups
from ..kv.parked import ParkedFrames
from ..kv.policies.dca import DualChunkAttention
from ..kv.policies.visual_context_window import VisualContextWindow
from ..kv.visual_memory import VisualMemory
from ..method import (
    ChunkMethod,
    DraftMethod,
    DraftPolicy,
    EncoderMethod,
    ExpertMethod,
    FrameMergingMethod,
    FramesMethod,
    LayerMethod,
    Method,
    PatchMethod,
    Policy,
    PreviewMethod,
    ProjectorMethod,
    ReactivatingMethod,
    ReadingPolicy,
    RebuildingMethod,
    RecallPolicy,
    RetracingMethod,
    ReuseMethod,
    Tap,
    TokenMethod,
)
from ..method.keys import fixed_keys
from ..method.refused import described, refuse
from ..method.results import check_type
from ..recipe import Recipe, Stage
from ..recipe.recipe import OVERRIDES, check_together
from .cache.close_gaps import CloseGaps
from .cache.dual_chunk import ReadChunks
from .cache.eviction import (
    CachePolicy,
    EvictByDraft,
    EvictByOwnText,
    EvictByReread,
    EvictBySurprise,
    EvictByText,
    EvictKeys,
)
from .cache.guided_eviction import EvictByGuides
from .cache.offload import FetchKeys, ParkKeys
from .cache.packing import PackKeys
from .cache.piece_eviction import EvictByPiece
from .cache.piece_reading import ReadByPiece
from .cache.reading import ReadKeys, ReadKeysAhead, RecallKeys
from .cache.recall import AskFrames, ReadFrames, RecallRun
from .cache.rotation import positions_of
from .cache.scaled_positions import ScalePositions
from .call.call import Call
from .call.forward import Continuation, Forward, Prompt
from .call.plan import (
    EncoderPlan,
    Kernels,
    ModelPlan,
    Offload,
    PlannedStage,
    cautions,
    checked_kernels,
    checked_offload,
)
from .call.runs import Run, TextInputs
from .call.split_prefill import SplitPrefill
from .layers import reactivation
from .layers.chunked_prefill import ChunkedPrefill
from .layers.experts import RankTokens, SkipExperts
from .layers.reactivation import Reactivation
from .layers.retracing import Retrace
from .layers.tokens import LayerTokens, PrepareLayers
from .prompt import draft, lookahead
from .prompt.continuation import ContinueText
from .prompt.proportional import WeighTokens
from .prompt.reduce import LookFirst, ReducePrompt, WritePrompt, positions_everywhere
from .prompt.tokens import TokenReducer

#: options that may differ in one call: all others decide which modules are hooked and which taps the tower has
PER_CALL = OVERRIDES


# --- plans ------------------------------------------------------------------------------------------------------------
def plan_encoder(recipe: Recipe, towers: Towers, kernels: Kernels) -> EncoderPlan:
    """The plan of an image encoder without a language model; raises :class:`MmaccelError` if the recipe is anything but one
    method inside the encoder, or the tower lacks what it needs."""
    built = recipe.build()
    method = built[0][1] if len(built) == 1 else None
    if not isinstance(method, EncoderMethod):
        raise MmaccelError(
            f"Recipe {recipe.name!r} is more than one method inside the encoder; use 'tome', 'pitome' or 'evit'."
        )
    method.suits(towers)
    stage = PlannedStage(0, method, built[0][0].retain)
    return EncoderPlan(recipe, towers, (stage,), stage, kernels=checked_kernels(kernels))


def plan_model(
    recipe: Recipe, family: Family, processor: Any, kernels: Kernels, offload: Offload | None = None
) -> ModelPlan:
    """The plan of a model; raises :class:`MmaccelError` if a value is invalid, the family lacks what a method needs, a layer is
    out of reach, or pixels are to be reduced that no prepared ``processor`` reduces."""
    notes: list[str] = []
    stages = tuple(
        PlannedStage(number, _fit(stage, method, family, notes), stage.retain)
        for number, (stage, method) in enumerate(recipe.build())
    )
    for stage in stages:
        stage.method.suits(family)
    if any(stage.method.site == "frames" for stage in stages) and getattr(processor, "mmaccel_recipe", None) is None:
        raise UnsupportedError(
            f"Recipe {recipe.name!r} works on pixels, which the model never sees; call "
            f"processor = prepare(processor, {recipe.name!r}), use that processor, and give it as processor=."
        )
    check_together(recipe.name, [stage.method for stage in stages])
    at_work = [stage.method.name for stage in _of((Policy, Codec), stages)]
    if family.recurrent and at_work:
        notes.append(
            f"{', '.join(at_work)}: at work in the {len(family.attending)} of {family.depth} layers that have attention; the "
            "others keep no keys, and what was evicted stays in their states"
        )
    rests = ((stage.number, stage.method.rest_codec()) for stage in _of(Policy, stages))
    rest = next(((number, codec) for number, codec in rests if isinstance(codec, Codec)), None)
    groups = token_groups({stage.number: stage.method for stage in _of(Codec, stages)}, rest)
    at_layer = _stage_at_layer(recipe, _of(LayerMethod, stages), family, notes)
    _check_gaps(recipe, stages, family, offload)
    notes += cautions(family, recipe)
    return ModelPlan(
        recipe,
        family,
        stages,
        notes=tuple(notes),
        kernels=checked_kernels(kernels),
        offload=checked_offload(offload),
        stage_at_layer=at_layer,
        token_groups=groups,
        key_biases=key_biases(family) if groups else {},
        text_towers={
            name: _text_tower(stage.method, name, family, processor)
            for stage in _of(TokenMethod, stages)
            if (name := stage.method.text_tower)
        },
        drafts={
            stage.number: load_draft(stage.method.name, stage.method.draft, family, processor)
            for stage in _of((DraftMethod, DraftPolicy), stages)
        },
        reactivates=any(isinstance(stage.method, ReactivatingMethod) for stage in at_layer.values()),
        choosers=tuple(stage.method.name for stage in _of(FramesMethod, stages) if stage.method.only_chooses),
        **_stages_by_kind(stages),
    )


def _check_gaps(recipe: Recipe, stages: tuple[PlannedStage[Any], ...], family: Family, offload: Offload | None) -> None:
    """Raise :class:`UnsupportedError` where keys cannot be given other positions, if they are to be."""
    closing = [stage.method.name for stage in _of(Policy, stages) if stage.method.close_gaps]
    if not closing:
        return
    why: str | None
    if others := [stage.method.name for stage in _of((LayerMethod, ChunkMethod, Codec), stages)]:
        why = f"{', '.join(others)} of recipe {recipe.name!r} leaves layers of different lengths, or packs keys as they stand"
    elif recipe.chunk is not None or offload is not None:
        why = "keys are moved when the whole prompt is evicted from, where chunk= and offload= have moved them on"
    else:
        why = fixed_keys(family)
    if why is not None:
        raise UnsupportedError(f"close_gaps=True of {closing[0]}: {why}; leave out close_gaps.")


def key_biases(family: Family) -> dict[int, Tensor]:
    """Biases of key projections, ``[Hkv, D]`` float32 by attention layer, counted among those; none where all are zero, or keys
    are more than their projection turned in halves."""
    if not family.halves or family.ranks > 1 or not hasattr(family.text, "rotary_emb"):
        return {}
    found = {}
    for number, layer in enumerate(family.attending):
        attention = family.attention_in(layer)
        bias = getattr(getattr(attention, "k_proj", None), "bias", None)
        width = getattr(attention, "head_dim", None)
        if not isinstance(bias, Tensor) or width is None or hasattr(attention, "k_norm") or bias.device.type == "meta":
            continue
        if bool(bias.detach().any()):
            found[number] = bias.detach().clone().float().view(-1, width)
    return found


def _stages_by_kind(stages: tuple[PlannedStage[Any], ...]) -> dict[str, Any]:
    """The fields of a plan that have one stage, or all, of a kind of method."""
    single = {
        "encoder": EncoderMethod,
        "patches": PatchMethod,
        "reuse": ReuseMethod,
        "frame_merging": FrameMergingMethod,
        "rebuilding": RebuildingMethod,
        "chunks": ChunkMethod,
        "policy": Policy,
        "reading": ReadingPolicy,
        "draft_policy": DraftPolicy,
        "retracing": RetracingMethod,
        "skipping": ExpertMethod,
    }
    by_kind: dict[str, Any] = {name: next(iter(_of(kind, stages)), None) for name, kind in single.items()}
    return by_kind | {"projector": _of(ProjectorMethod, stages)}


def _of(kind: type | tuple[type, ...], stages: tuple[PlannedStage[Any], ...]) -> tuple[PlannedStage[Any], ...]:
    """The stages whose method is of a kind."""
    return tuple(stage for stage in stages if isinstance(stage.method, kind))


def _fit(stage: Stage, method: Method, family: Family, notes: list[str]) -> Method:
    """The method with its defaults for this model; a default layer that is out of reach is moved."""
    variant: Literal["official", "exact"] = "official" if method.official else "exact"
    fitted = check_type(method, "fit()", method.fit(family), Method).by(variant)
    taps: Any = fitted.taps()
    if not isinstance(taps, (tuple, list)) or not all(isinstance(tap, Tap) for tap in taps):
        refuse(fitted, "taps()", described(taps), "a tuple of Tap")
    if not isinstance(fitted, LayerMethod) or "layer" in stage.options:
        return fitted
    near = fitted.within(family).by(variant)
    if near is not fitted:
        notes.append(
            f"{method.name} works at layer {near.layer}: layer {fitted.layer}, its default, is out of reach in this model"
        )
    return near


def _layers(method: LayerMethod) -> range:
    return check_type(method, "layers()", method.layers(), range)


def _stage_at_layer(
    recipe: Recipe, stages: tuple[PlannedStage[LayerMethod], ...], family: Family, notes: list[str]
) -> dict[int, PlannedStage[LayerMethod]]:
    """The stage that works at each layer. Shares of the depth may fall together in a shallow model: of stages of one method the
    last counts, which keeps least."""
    by_layer: dict[int, PlannedStage[LayerMethod]] = {}
    for stage, layer in ((one, layer) for one in stages for layer in _layers(one.method)):
        if by_layer and layer < max(by_layer):
            raise MmaccelError(
                f"Recipe {recipe.name!r}: in this model of {family.depth} layers {stage.method.name!r} comes to work at layer "
                f"{layer}, below the stage before it at layer {max(by_layer)}; give rising layers."
            )
        if before := by_layer.get(layer):
            if before.method.name != stage.method.name:
                raise MmaccelError(
                    f"Recipe {recipe.name!r}: in this model of {family.depth} layers {before.method.name!r} and "
                    f"{stage.method.name!r} both fall on layer {layer}; give them layers that differ."
                )
            notes.append(
                f"stages {before.number} and {stage.number} ({stage.method.name}) both fall on layer {layer} of "
                f"{family.depth}: only stage {stage.number} works"
            )
        by_layer[layer] = stage
    for layer, stage in by_layer.items():
        reach = stage.method.reach(family)
        if layer not in reach:
            if not reach:
                raise UnsupportedError(
                    f"{stage.method.name} looks at the attention of a layer, and no layer that it could look at in this "
                    f"{family.name} model has one; use a recipe that works before the language model."
                )
            why = ", since its first layers add DeepStack features" if family.deepstack else ""
            why = f", next to those with attention, which {stage.method.name} looks at" if family.stateful else why
            where = ", ".join(map(str, reach)) if family.stateful else f"{reach[0]} to {reach[-1]}"
            raise UnsupportedError(
                f"layer={layer} is out of reach: in this {family.name} model tokens can be dropped before layers "
                f"{where}{why}; give layer={min(reach, key=lambda one: abs(one - layer))}."
            )
    return by_layer


def _text_tower(method: TokenMethod, name: str, family: Family, processor: Any) -> TextTower:
    """The text tower that a method names."""
    if processor is None:
        raise UnsupportedError(f"{method.name} with a text tower reads the question as text; give processor=.")
    tower = TextTower.load(name, next(family.inner.parameters()).device)
    if tower.width != (width := family.vision.hidden_size):
        raise UnsupportedError(
            f"{name!r} was trained with a vision tower of width {tower.width}, but that of this "
            f"{family.name} model is {width} wide; name the CLIP model that it comes from."
        )
    return tower


def plan_for_call(
    plan: ModelPlan, asked: bool | Mapping[str, Any] | None, lossless: bool = False, pins: bool = False
) -> ModelPlan:
    """The plan of one call: ``plan`` (None, True), one in which nothing happens (False), or one with other values of
    :data:`PER_CALL`; where a draft is verified for the bare model's answer (``lossless``) one in which nothing happens but
    that keys are where those of ``plan`` are, that it is read in as many pieces, and that its steps can be captured (``pins``).
    Raises :class:`MmaccelError` if a value is invalid or cannot change."""
    if asked is False:
        notes = ("mmaccel=False: the bare model ran",)
        return ModelPlan(Recipe("none"), plan.towers, (), None, notes, plan.kernels, origin=plan)
    if lossless:
        shaping = plan_for_call(plan, asked).recipe
        bare = Recipe("none", chunk=shaping.chunk, frames_at_once=shaping.frames_at_once)
        return ModelPlan(bare, plan.towers, (), None, (), plan.kernels, origin=plan, offload=plan.offload, pins=pins)
    if asked is None or asked is True:
        return plan
    if not isinstance(asked, Mapping):
        raise MmaccelError(
            f"mmaccel={asked!r} says nothing about a call; give {{'retain': 0.1}} or the like, or False for the bare model."
        )
    for name in asked:
        if name not in PER_CALL:
            raise MmaccelError(
                f"{name!r} cannot change for one call, which takes {', '.join(PER_CALL)}; call accelerate_vlm(model, ...) "
                "again with what you want."
            )
    recipe = plan.recipe.override(**{name: value for name, value in asked.items() if value is not None})
    stages = _in_variant(plan, recipe)
    _check_gaps(recipe, stages, plan.family, plan.offload)
    primary = None if recipe.primary is None else plan.stages[recipe.primary].method
    if isinstance(primary, FramesMethod) and recipe.retain != plan.recipe.retain:
        raise UnsupportedError(
            f"retain of recipe {recipe.name!r} is what {primary.name} keeps of the pixels, which the processor has reduced "
            f"before this call; prepare(processor, {recipe.name!r}, retain=...) makes one that keeps something else."
        )
    return replace(
        plan,
        recipe=recipe,
        stages=stages,
        notes=tuple(note for note in plan.notes if note not in cautions(plan.family, plan.recipe))
        + cautions(plan.family, recipe),
        origin=plan,
        stage_at_layer={at: stages[stage.number] for at, stage in plan.stage_at_layer.items()},
        **_stages_by_kind(stages),
    )


def _in_variant(plan: ModelPlan, recipe: Recipe) -> tuple[PlannedStage[Any], ...]:
    """The same stages with the budgets and in the variant of ``recipe``."""
    stages = []
    for stage, (asked, method) in zip(plan.stages, recipe.build(), strict=True):
        if recipe.variant != plan.recipe.variant:
            method = _fit(asked, method, plan.family, [])
            method.suits(plan.family)
            if method.taps() != stage.method.taps() or (isinstance(method, Codec) and method != stage.method):
                raise UnsupportedError(
                    f"variant={recipe.variant!r} cannot be had for one call: {method.name!r} then asks something else of "
                    f"the model; call accelerate_vlm(model, ..., variant={recipe.variant!r})."
                )
        else:
            method = stage.method
        stages.append(PlannedStage(stage.number, method, asked.retain))
    return tuple(stages)


# --- runs -------------------------------------------------------------------------------------------------------------
def make_runs(call: Call[ModelPlan], forward: Forward) -> Iterator[Run]:
    """The work of a plan in one forward of the text model, in the order in which it is done."""
    fetch = None if call.plan.offload is None or forward.state is None else FetchKeys(forward, forward.state)
    if fetch is not None:
        yield fetch
    policy: CachePolicy | None = None
    runs: Iterator[Run] = iter(())
    if isinstance(forward, Prompt):
        runs = _runs_of_prompt(call, forward)
    elif isinstance(forward, Continuation):
        runs = _runs_behind(call, forward)
    alone = True
    for run in runs:
        policy = run if isinstance(run, CachePolicy) else policy
        alone &= not run.sees_attention
        yield run
    if fetch is not None:
        fetch.by_heads = alone
        yield ParkKeys(fetch, policy, call.expected.after(forward.seen + forward.length))


def _runs_of_prompt(call: Call[ModelPlan], prompt: Prompt) -> Iterator[Run]:
    plan, state = prompt.plan, prompt.state
    split = None if plan.recipe.chunk is None else SplitPrefill(prompt, plan.recipe.chunk)
    reactivation.check_rows(prompt)
    reducer = TokenReducer(prompt, call.vision)
    if plan.retracing is not None:
        yield Retrace(prompt, plan.retracing.method)
    yield ReducePrompt(call, prompt, reducer, _looks_first(plan))
    if plan.policy is not None and isinstance(plan.policy.method, VisualContextWindow):
        yield ScalePositions(prompt, plan.policy.method, state, positions_of(plan.family.text.config))
    chunks = None if plan.chunks is None else ChunkedPrefill(prompt, plan.chunks)
    prepared = PrepareLayers(prompt)
    if plan.stage_at_layer:
        keep = {
            stage.number: partial(reactivation.keep_dropped, prompt)
            for stage in plan.stage_at_layer.values()
            if isinstance(stage.method, ReactivatingMethod)
        }
        yield LayerTokens(call, prompt, reducer, prepared, keep)
    if plan.skipping is not None:
        yield (RankTokens if plan.skipping.method.ranks else SkipExperts)(prompt, plan.skipping.method)
    if chunks is not None:
        yield chunks
    policy, recall = None, _recall(prompt, state)
    if state is not None and plan.policy is not None and recall is None:
        policy = _policy(call, prompt, state, split)
        yield policy
        if plan.policy.method.close_gaps:
            yield CloseGaps(prompt, state)
    if state is not None and plan.token_groups:
        yield PackKeys(prompt, state, policy)
    yield WeighTokens(prompt)
    yield WritePrompt(prompt, reducer, None if chunks is None else chunks.cut)
    if recall is not None:
        yield recall
    if state is not None and plan.policy is not None and isinstance(plan.policy.method, DualChunkAttention):
        yield ReadChunks(prompt, plan.policy.method, state, positions_of(plan.family.text.config))
    yield prepared
    if split is not None and recall is None:
        yield split


def _runs_behind(call: Call[ModelPlan], forward: Continuation) -> Iterator[Run]:
    plan, state = forward.plan, forward.state
    assert state is not None
    if plan.retracing is not None and state.shared.memory(VisualMemory) is not None:
        yield Retrace(forward, plan.retracing.method)
    if plan.policy is not None and isinstance(plan.policy.method, VisualContextWindow):
        yield ScalePositions(forward, plan.policy.method, state, None)
    if plan.reactivates and reactivation.may_return(plan, state):
        stages: Mapping[int, PlannedStage[Any]] = plan.stage_at_layer
        yield Reactivation(forward, stages)
    if plan.skipping is not None:
        yield SkipExperts(forward, plan.skipping.method)
    policy = None
    if plan.policy is not None and plan.policy.method.decodes and not call.inputs.reads_all:
        policy = _policy(call, forward, state)
        yield policy
    if any(group.of != "rest" for group in plan.token_groups):
        yield PackKeys(forward, state, policy)
    yield ContinueText(forward)
    if plan.policy is not None and isinstance(plan.policy.method, DualChunkAttention):
        yield ReadChunks(forward, plan.policy.method, state, positions_of(plan.family.text.config))
    if (recall := _recall(forward, state)) is not None:
        yield recall
    elif plan.recipe.chunk is not None and plan.splits(forward.length):
        yield SplitPrefill(forward, plan.recipe.chunk)


def _recall(forward: Forward, state: CacheState | None) -> RecallRun | None:
    """The run that parks or recalls frames of a stream; None in any other forward, and while an answer is decoded."""
    memory = None if state is None else state.shared.memory(ParkedFrames)
    stage = forward.plan.policy
    if state is None or memory is None or stage is None or not isinstance(stage.method, RecallPolicy):
        return None
    if isinstance(forward, Prompt):
        return ReadFrames(forward, stage.method, state, memory)
    return AskFrames(forward, stage.method, state, memory) if memory.asking else None


def _policy(
    call: Call[ModelPlan], forward: Forward, state: CacheState, split: SplitPrefill | None = None
) -> CachePolicy:
    """The run of a plan's policy."""
    plan = forward.plan
    assert plan.policy is not None
    if plan.reading is not None and plan.reading.method.ahead:
        return ReadKeysAhead(call, forward, plan.reading, state)
    if plan.reading is not None and split is not None and plan.reading.method.by_piece:
        return ReadByPiece(forward, plan.reading, state, split)
    if plan.reading is not None:
        return ReadKeys(forward, plan.reading, state)
    if plan.policy.method.recalls:
        return RecallKeys(forward, plan.policy, state)
    if plan.draft_policy is not None and isinstance(forward, Prompt):
        return EvictByDraft(call, forward, plan.draft_policy, state)
    if isinstance(forward, Prompt) and (by_text := _evicts_by_text(plan.policy.method)) is not None:
        return by_text(call, forward, plan.policy, state)
    if split is not None:
        return EvictByPiece(forward, plan.policy, state, split)
    return EvictKeys(forward, plan.policy, state)


def _evicts_by_text(policy: Policy) -> type[EvictByText] | None:
    """The run of a policy that evicts by what the model makes of a prompt when it is over."""
    if policy.lookahead:
        return EvictByOwnText
    if policy.needs_surprise:
        return EvictBySurprise
    if policy.guided:
        return EvictByGuides
    return EvictByReread if policy.rereads else None


def _looks_first(plan: ModelPlan) -> dict[int, LookFirst]:
    """By number of a stage, a function that makes the figures of a model that reads the prompt before its method works."""
    looks: dict[int, LookFirst] = {}
    for stage in plan.projector:
        if isinstance(stage.method, PreviewMethod):
            looks[stage.number] = partial(_first_pass, stage.method)
        elif isinstance(stage.method, DraftMethod):
            looks[stage.number] = partial(_draft_reads, stage.method, plan.drafts[stage.number])
    return looks


def _first_pass(
    method: PreviewMethod, call: Call[ModelPlan], prompt: Prompt, text: TextInputs
) -> Mapping[str, torch.Tensor]:
    positions = positions_everywhere(prompt, text.arguments.get("position_ids"), text.embeds.device)
    return lookahead.first_pass(call, prompt, method, text, positions)


def _draft_reads(
    method: DraftMethod, model: Family, call: Call[ModelPlan], prompt: Prompt, text: TextInputs
) -> Mapping[str, torch.Tensor]:
    seen = draft.read(call, method, model, len(text.embeds), prompt.length)
    return {"draft_match": seen.to(text.embeds.device)}
