"""Accelerate vision and video LLMs: :func:`accelerate_vlm`, its handle, and the context manager :func:`accelerated`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn

from ..core.figures import CallStats
from ..core.layout import Layout
from ..core.reduction import Reduction
from ..core.stats import UNCAPTURED, Stats
from ..core.transformers_api import cache_in, cache_names
from ..core.transformers_api import check as check_transformers
from ..errors import MmaccelError, UnsupportedError
from ..families import Family, family_of
from ..families.base import Wrapper
from ..kv.cache import state_of, static_view_of
from ..recipe import Positions, Proportional, Recipe, RecipeLike, Variant, get_recipe
from ..runtime.build import make_runs, plan_for_call, plan_model
from ..runtime.cache.eviction import hook_queries
from ..runtime.cache.scaled_positions import hook_rotations
from ..runtime.call.attention import TEXT
from ..runtime.call.call import Call, CallInputs, VisionState, current, pop, push
from ..runtime.call.forward import PromptResult, StageResult
from ..runtime.call.hooks import TextHooks, show_dropped
from ..runtime.call.plan import Kernels, ModelPlan, Offload, first_set
from ..runtime.call.split_prefill import split_forward
from ..runtime.call.vision_output import VisionOutput
from ..runtime.graphs import captured
from ..runtime.layers.experts import hook_experts
from ..runtime.layers.retracing import hook_mlps
from ..runtime.tower.attention import VISION
from ..runtime.tower.encoder_merging import EncoderMerging, hook_features
from ..runtime.tower.frame_groups import encode_in_groups
from ..runtime.tower.frame_merging import FrameMerging
from ..runtime.tower.frame_reuse import FrameReuse
from ..runtime.tower.patch_pruning import PatchPruning
from ..runtime.tower.rebuilding import Rebuilding
from ..runtime.tower.sounds import hook_sounds
from ..runtime.tower.taps import Taps
from .drafting import Drafts, draft_of_call, with_tuned_layers
from .fallback import Fallback, FallbackLike, share_towers, with_fallback
from .handle import Handle, check_model, exchange, restored
from .positions import has_axes, too_long
from .shared_cache import share_cache
from .tuned import warn_of_another

M = TypeVar("M", bound=nn.Module)


class Accelerator(Handle):
    """The handle ``model.mmaccel`` of an accelerated model: statistics, last reduction, removal.

    Examples
    --------
    >>> handle = accelerate_vlm(model, "divprune", retain=0.25).mmaccel
    >>> tokens = model.generate(**inputs, max_new_tokens=4)
    >>> handle.stats().visual_tokens, handle.stats().visual_tokens_kept
    (196, 49)
    >>> int((handle.reduction.kept & handle.layout.visual).sum())
    49
    >>> handle.remove()
    """

    what = "model"
    plan: ModelPlan

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        processor: Any = None,
        kernels: Kernels = "auto",
        drafts: Drafts | None = None,
        fallback: Fallback | None = None,
        offload: Offload | None = None,
    ) -> None:
        check_transformers()
        super().__init__(model)
        self.processor, self.fallback = processor, fallback
        self.drafts = drafts or Drafts(False, None, False)
        self.plan = plan_model(recipe, family_of(model, processor), processor, kernels, offload)
        self.plan.check_generation(model.generation_config)
        self._last: Call[ModelPlan] | None = None
        drafting_model = self.drafts.load(self.family, recipe, processor)
        self._install()
        if drafting_model is not None:
            try:
                self._restore.append(Accelerator(drafting_model, recipe, processor, kernels).remove)
            except BaseException:
                self.remove()
                raise

    # --- for the user -----------------------------------------------------------------------------------------
    @property
    def family(self) -> Family:
        """The adapter of the model's family."""
        return self.plan.family

    @property
    def kernels(self) -> Kernels:
        """``"auto"`` or ``"off"``, see :func:`accelerate_vlm`."""
        return self.plan.kernels

    def stats(self) -> CallStats:
        """Figures of the last call; empty before the first. A streamer gets those of its own call so far."""
        latest = current(self.plan) or self._last
        return CallStats() if latest is None else latest.figures(self.family.text.config)

    @property
    def _result(self) -> PromptResult | None:
        latest = current(self.plan) or self._last
        return None if latest is None else latest.result

    @property
    def layout(self) -> Layout | None:
        """The layout of the last prompt that had pictures."""
        return None if self._result is None else self._result.layout

    @property
    def reduction(self) -> Reduction | None:
        """The tokens that are left of the last prompt that had pictures, ``[B, S]``, over all prefill stages."""
        return None if self._result is None else self._result.reduction

    @property
    def history(self) -> list[StageResult]:
        """The reductions stage by stage, in the order in which the stages worked."""
        return [] if self._result is None else list(self._result.history)

    def check_fallback(self, wanted: bool) -> None:
        """Raise UnsupportedError if a fallback is ``wanted`` and the model has drafts."""
        self.drafts.check(self.recipe, self.processor, wanted)

    def remove(self) -> None:
        """Restore the model. Drafts and text towers that were loaded for it are freed, unless another model uses them."""
        super().remove()
        self._drop_stale(None)
        # these refer to the handle; a handle that is kept for its statistics keeps no loaded model
        for name in ("taps", "text", "merging", "pruning", "reuse"):
            self.__dict__.pop(name, None)
        self.plan = dataclasses.replace(self.plan, drafts={}, text_towers={})
        if self._last is not None:
            self._last.plan = self.plan

    def again(self) -> Accelerator:
        """Accelerate the model again in the same way, after :meth:`remove`."""
        how = self.processor, self.kernels, self.drafts, self.fallback, self.plan.offload
        return Accelerator(self._model, self.recipe, *how)

    # --- putting it on ----------------------------------------------------------------------------------------
    def _attach(self) -> None:
        model, plan, family, inner = self._model, self.plan, self.family, self.family.inner
        self.taps = Taps(family, [tap for stage in plan.stages for tap in stage.method.taps()])
        hook_features(plan, self.taps, self._hook)
        if plan.encoder is not None:
            self.merging = EncoderMerging(plan, plan.encoder, self._hook, language=True)
        if plan.patches is not None:
            self.pruning = PatchPruning(plan, self._hook)
        if plan.reuse is not None:
            self.reuse = FrameReuse(plan, self._wrap)
        self.text = TextHooks(plan, make_runs, self.check_attached, self._hook)
        self._wrap(family.text, "forward", functools.partial(split_forward, plan))
        for hooks in (hook_queries, hook_rotations, hook_mlps, hook_sounds, _merge_and_rebuild, self.drafts.attach):
            hooks(plan, self._hook)
        hook_experts(plan, self._hook, self._wrap)
        self._hook(inner.register_forward_pre_hook(self._note_inputs, with_kwargs=True))
        for module in (model, inner):
            self._hook(module.register_forward_pre_hook(self._open, with_kwargs=True, prepend=True))
            self._hook(module.register_forward_hook(self._close, with_kwargs=True, always_call=True))
        self._wrap(model, "generate", self._generate)
        reads = functools.partial(with_fallback, self.fallback, self, family, lambda: self._last, self.check_fallback)
        self._wrap(model, "generate", reads)
        self._wrap(model, "set_attn_implementation", self._set_attention)
        if self.drafts:
            self._wrap(model, "_get_stopping_criteria", functools.partial(_with_tokenizer, plan))
        share_towers(family, self._wrap)
        for tower in family.towers():
            self._wrap(tower, "forward", functools.partial(encode_in_groups, plan, tower))
        for modality in family.modalities:
            if hasattr(inner, f"get_{modality}_features"):
                self._wrap(inner, f"get_{modality}_features", functools.partial(_encode, plan, modality))
        self._shapes = False
        if plan.active:
            _shape(self)

    # --- while it runs ----------------------------------------------------------------------------------------
    def _call(self, asked: Any, cache: Any, opened_by: Any = None, how: tuple[bool, str] = (False, "")) -> Call[Any]:
        """The call for ``mmaccel=asked``; ``how``: whether for the bare model's answer, and why it is not captured then."""
        lossless, uncaptured = how
        plan = plan_for_call(self.plan, asked, lossless, pins=lossless and not uncaptured)
        if plan.active and not self._shapes:
            _shape(self)
        if asked is False or lossless:
            _check_bare(plan, cache)
        stats = Stats(plan.recipe.name, notes=list(plan.notes), uncaptured=uncaptured or UNCAPTURED)
        return Call(plan, stats, VisionState(self.taps), CallInputs(opened_by), cache)

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate(*args: Any, mmaccel: bool | Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
            if not self.attached:  # a shallow copy of the model kept this method when the handle was removed
                return original(*args, **kwargs)
            (args, kwargs), with_ids = share_cache(self.plan, args, kwargs, mmaccel)
            configs = _Given(kwargs), kwargs.get("generation_config", *args[1:2]), self._model.generation_config
            self._drop_stale(None)
            # a loop of the caller's own, and that of a model that drafts, take no drafts
            drafted = bool(self.drafts) and mmaccel is not False and kwargs.get("custom_generate") is None
            bare = drafted and self.drafts.runs_bare(self.plan)
            mmaccel = _take_chunk(self.plan, mmaccel, configs, kwargs)
            given = {"input_ids": args[0] if args else kwargs.get("inputs"), **kwargs}
            uncaptured = self.drafts.obstacle_to_capture(self.plan, given, configs) if bare else ""
            call = self._call(mmaccel, cache_in(kwargs), how=(bare, uncaptured))
            call.plan.check_generation(*configs)
            call.expected.new = first_set("max_new_tokens", *configs)
            call.inputs.block = int(not any(first_set(name, *configs) for name in _CANDIDATES))
            if isinstance(ids := given["input_ids"], Tensor) and ids.dim() == 2:
                call.inputs.given_length = ids.shape[1]
            if call.plan.drafts:
                # what generate makes of them may be encoded already
                call.inputs.given = given
            _warn_too_long(self._model, call, given)
            if drafted:
                self.drafts.prepare(given, call)
                given = {**inspect.signature(original).bind_partial(*args, **kwargs).arguments, **given}
                decoder = self.drafts.decoder(self._model, self.family, given, mmaccel, call)
                kwargs["custom_generate"] = decoder
            push(call)
            try:
                output = original(*args, **kwargs)
                call.trim()
                if drafted:
                    decoder.drafting.report(call.stats)
                return with_ids(output)
            finally:
                pop(call)
                call.finish(self.family.text.config)
                self._last = call

        return generate

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open a call for a direct forward; ``generate`` has opened one already."""
        if static_view_of(kwargs) is not None:
            return None
        self._drop_stale(module)
        if current(self.plan) is not None and "mmaccel" not in kwargs:
            return None
        kwargs = dict(kwargs)
        call = self._call(kwargs.pop("mmaccel", None), cache_in(kwargs), opened_by=module)
        labels = kwargs.get("labels")
        if call.plan.active and isinstance(labels, Tensor):
            kwargs["labels"] = call.inputs.labels = labels.clone()
        push(call)
        return args, kwargs

    def _drop_stale(self, module: nn.Module | None) -> None:
        """Close a call that a keyboard interrupt left open; it is stale when the same module, or ``generate`` (None),
        starts again."""
        call = current(self.plan)
        opened_by = None if call is None else call.inputs.opened_by
        if call is not None and opened_by is not None and module in (None, opened_by):
            pop(call)

    def _close(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if static_view_of(kwargs) is not None:
            return None
        call = current(self.plan)
        if call is None or call.inputs.opened_by is not module:
            return None
        pop(call)
        dropped = call.text.dropped
        call.finish(self.family.text.config)
        self._last = call
        return None if dropped is None or output is None else _show_dropped(self._model, output, kwargs, dropped)

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if static_view_of(kwargs) is not None:
            return None
        call = current(self.plan)
        if call is None:
            return None
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = cache_in(kwargs)
        call.begin_forward(ids, cache)
        call.inputs.mask = kwargs.get("attention_mask")
        call.inputs.input_ids, call.inputs.clips = ids, kwargs.get("pixel_values_videos")
        given = ((name, kwargs.get(name)) for name in self.family.extra_inputs)
        call.inputs.extra = {name: value for name, value in given if value is not None}
        if call.plan.drafts and not call.generating:
            call.inputs.given = {**kwargs, "input_ids": ids}
        call.cache = cache if cache is not None else call.cache
        embeds = kwargs.get("inputs_embeds")
        if ids is None and embeds is not None and call.plan.active and (cache is None or cache.get_seq_length() == 0):
            raise UnsupportedError(
                "With inputs_embeds mmaccel cannot tell visual tokens from text; pass input_ids and pixel values instead."
            )
        if self.family.masks_above and call.plan.active and state_of(cache) is not None:
            # masks that are made of lengths alone would be wrong behind a reduced prompt; attention makes its own
            return args, {**kwargs, "attention_mask": self.family.mask_argument(None)}
        return None


def _merge_and_rebuild(plan: ModelPlan, hook: Callable[..., None]) -> None:
    """Let the methods of a plan merge frames in the vision tower, and rebuild the patches that layers leave out."""
    if plan.frame_merging is not None:
        FrameMerging(plan, plan.frame_merging, hook)
    if plan.rebuilding is not None:
        Rebuilding(plan, plan.rebuilding, hook)


def _check_bare(plan: ModelPlan, cache: Any) -> None:
    """Raise where the bare model would misread a cache; one that is whole it reads by an active ``plan``."""
    state = state_of(cache)
    if state is not None and state.seen and not (plan.active and state.whole):
        raise UnsupportedError(
            "This cache holds what mmaccel left of its prompt, which the bare model would misread; leave out mmaccel=False, "
            "or begin with a new cache."
        )


def _shape(handle: Accelerator) -> None:
    """Let mmaccel shape the forwards of a model: of a recipe without stages when the first call asks for it."""
    model, plan, family = handle._model, handle.plan, handle.family
    handle._shapes = True
    handle._wrap(model, "_valid_auto_compile_criteria", functools.partial(captured.may_capture, plan))
    handle._wrap(model, "get_compiled_call", functools.partial(captured.captured_forward, plan))
    for target, name, wrapper in family.wrappers():
        handle._wrap(target, name, functools.partial(_in_call, wrapper, plan))
    for name in filter(functools.partial(hasattr, model), _CONTINUOUS):
        handle._wrap(model, name, _no_continuous_batching)
    handle._patch_attention(family.text, TEXT)
    inside = plan.encoder or plan.patches or plan.frame_merging or plan.rebuilding
    if handle.taps.need_attention or inside is not None:
        for tower in family.towers():
            handle._patch_attention(tower, VISION)


def _take_chunk(plan: ModelPlan, asked: Any, configs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call is asked for, with ``prefill_chunk_size`` as its chunk: transformers would cut a prompt before anything of it
    is reduced, and is not told in ``kwargs``."""
    size = first_set("prefill_chunk_size", *configs)
    if size is None or asked is False or not plan.active:
        return asked
    plan.check_generation(*configs)
    kwargs["prefill_chunk_size"] = None
    return {"chunk": size, **(asked if isinstance(asked, Mapping) else {})}


def _encode(plan: ModelPlan, modality: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the encoding of pictures or clips: methods that look at the tower see what it gives in this call."""
    family = plan.family
    signature = inspect.signature(original)

    @functools.wraps(original)
    def features(*args: Any, **kwargs: Any) -> Any:
        call = current(plan)
        if call is None or call.vision.running is not None:
            return original(*args, **kwargs)
        device = next(family.inner.parameters()).device
        if not (call.plan.stages or call.plan.active):
            # no tap and no method looks at the tower
            with call.stats.clock.measure("encoder", device):
                return original(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        # transformers 5.17 does not name all that it hands on
        call.vision.running = encoded = VisionOutput(given | given.pop("kwargs", {}), modality=modality)
        try:
            with call.stats.clock.measure("encoder", device):
                output = original(*args, **kwargs)
        finally:
            call.vision.running = None
        encoded.tokens = sum(part.numel() // part.shape[-1] for part in family.features(output))
        of_clips = call.inputs.clips is not None and encoded.arguments.get("pixel_values") is call.inputs.clips
        call.vision.outputs["video" if of_clips else modality] = encoded
        return output

    return features


def _warn_too_long(model: Any, call: Call[ModelPlan], given: Mapping[str, Any]) -> None:
    """Warn of a prompt and an answer that need more positions than the model has, which the bare model answers, too."""
    ids = given["input_ids"]
    if not call.plan.active or not isinstance(ids, Tensor) or ids.dim() != 2:
        return
    if call.cache is not None and call.cache.get_seq_length() and has_axes(model):
        # the positions of earlier pictures are not known here
        return
    inputs = {name: value for name, value in given.items() if name not in cache_names()}
    sentence = too_long(model, call.plan.recipe, inputs, call.expected.new or 1)
    if sentence is not None:
        call.stats.notes.append(sentence)
        warnings.warn(sentence, stacklevel=3)


#: arguments of ``generate`` by which transformers verifies candidates
_CANDIDATES = "prompt_lookup_num_tokens", "assistant_model"


class _Given:
    """Keyword arguments of ``generate``, read like a generation config."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self._kwargs = kwargs

    def __getattr__(self, name: str) -> Any:
        return self._kwargs.get(name)


def _with_tokenizer(plan: ModelPlan, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the making of stopping criteria: ``generate`` with a loop that is not its own drops the tokenizer, which stop
    strings need."""

    @functools.wraps(original)
    def criteria(*args: Any, tokenizer: Any = None, **kwargs: Any) -> Any:
        call = current(plan)
        tokenizer = call.inputs.tokenizer if tokenizer is None and call is not None else tokenizer
        return original(*args, tokenizer=tokenizer, **kwargs)

    return criteria


#: transformers' continuous batching takes no pixels
_CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def _no_continuous_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{original.__name__}() takes no pixels, so an accelerated model has nothing to reduce there; use generate(), or "
            "call model.mmaccel.remove() first."
        )

    return refuse


def _in_call(wrapper: Wrapper, plan: ModelPlan, original: Callable[..., Any]) -> Callable[..., Any]:
    def call() -> Call[ModelPlan] | None:
        call = current(plan)
        return call if call is not None and call.plan.active else None

    return wrapper(original, call)


def _show_dropped(model: nn.Module, output: Any, kwargs: Mapping[str, Any], dropped: Any) -> Any:
    """The output of a forward, with logits at dropped tokens too."""
    # models without the argument ignore it
    hears = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    kept = kwargs.get("logits_to_keep", 0) if hears else 0
    if isinstance(output, tuple):
        # behind the loss, if there is one
        at = int(kwargs.get("labels") is not None)
        return (*output[:at], show_dropped(output[at], dropped, kept), *output[at + 1 :])
    output.logits = show_dropped(output.logits, dropped, kept)
    return output


def _model(model: Any) -> Any:
    """The model inside a PEFT model, else the model."""
    check_model(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accelerate_vlm(
    model: M,
    recipe: RecipeLike = "balanced",
    *,
    retain: float | None = None,
    processor: Any = None,
    positions: Positions | None = None,
    variant: Variant | None = None,
    text_retain: float | None = None,
    proportional: Proportional | None = None,
    chunk: int | None = None,
    frames_at_once: int | None = None,
    kernels: Kernels = "auto",
    offload: Offload | None = None,
    lossless: bool = False,
    draft: Any = None,
    lookup: bool | str = False,
    fallback: FallbackLike = None,
    **options: Any,
) -> M:
    """Make a vision or video LLM skip visual tokens, in place.

    Parameters
    ----------
    model : a ``...ForConditionalGeneration`` model of a supported family (or a PEFT model around one). It keeps its class;
        a model that is accelerated already gets the new recipe instead.
    recipe : the name of a recipe or method; a method with its options, such as ``FastV(layer=3)``, also one of a class of yours
        that is not registered; a :class:`Recipe`, its content as a mapping or as JSON, or a JSON file; or several in a list, in
        the order of their sites.
    retain : what is kept of every picture and clip: a float is the share of its visual tokens, an int their number. By default
        as the recipe says.
    processor : needed by families whose prompt only the tokenizer can read (InternVL, SmolVLM: to know which tiles and
        frames belong together), and by methods that read the question as text.
    positions : ``"keep"`` (tokens keep their positions) or ``"paper"`` (as the method's authors did); see :class:`Recipe`.
    variant : ``"exact"``, or ``"official"``: every method does what its authors' program does, where that differs from the
        paper; see :class:`Recipe`.
    text_retain : share of the text keys that a cache policy keeps; by default all of them.
    proportional : ``"pictures"`` or ``"all"``: in the attention of the language model tokens that are left, of pictures or of
        clips too, weigh as many as they represent; ``"restore"`` does so as RESTORE does, with a factor of distance; see
        :class:`Recipe`. By default ``"none"`` do.
    chunk : tokens of a prompt that the language model reads at once, so that activations do not grow with the prompt; see
        :class:`Recipe`. By default all. ``prefill_chunk_size`` of ``generate`` is taken for it.
    frames_at_once : pictures, tiles or frames that the vision tower encodes at once, so that its activations do not grow with
        the clip; see :class:`Recipe`. By default all, or as many as fit where all would not fit in memory.
    kernels : ``"auto"`` runs Triton kernels on GPUs on which they build; ``"off"`` runs their plain definitions for this model,
        whatever the device.
    offload : ``"host"`` keeps keys and values in pinned host memory. A layer is fetched while the one before it computes; of
        layers from which a step reads chosen keys only these cross the bus. Answers stay the same; steps are not captured. By
        default the device has them.
    lossless : the answer is that of the bare model, token for token (in float32; in half precision up to ties that rounding
        decides; when sampling, in distribution). The recipe then shapes only what drafts: the model reads the whole prompt and
        verifies every token. Without a ``draft`` and ``lookup`` the model drafts for itself, where this can pay.
    draft : a smaller model of the same family, loaded, or its folder or hub id, that drafts tokens which the model verifies; it
        gets the recipe, too. Without ``lossless`` the model verifies for the answer that it gives with the recipe. With
        ``lossless`` also a head that was trained for this model: an assistant of Gemma 4. ``"self"``
        makes the model draft for itself, and with ``lossless`` a list of layer numbers makes it skip these while it does, by
        default those that ``mmaccel tune --draft-layers`` has written into the recipe.
        Of a recipe whose method has an option of this name it is that option, unless ``lossless``.
    lookup : draft by copying what followed the newest tokens in the prompt or in earlier answers; a name from
        :data:`mmaccel.decoding.DRAFTERS` says how, True is ``"suffixdecoding"``.
    fallback : read a prompt again with more tokens, at last with all, where the model is unsure of its answer: a
        :class:`Fallback`, its fields as a mapping, a threshold of certainty such as 0.6, or True for what ``mmaccel tune
        --fallback`` has written into the recipe.
    **options : options of the recipe's methods, each of which must belong to one method only.

    Returns
    -------
    The same model. ``model.mmaccel`` is its :class:`Accelerator`: ``stats()``, ``recipe``, ``remove()``. Its ``generate`` and
    its forward take ``mmaccel=``: a mapping such as ``{"retain": 0.1}`` (retain, positions, variant, text_retain, proportional,
    chunk, frames_at_once; of ``generate`` also fallback) holds for this one call, and ``False`` runs the bare model once.

    Raises
    ------
    MmaccelError
        If it is not a model, or the recipe, a budget, an option, ``kernels`` or ``offload`` is not valid.
    UnsupportedError
        If the family, the attention implementation or the generation config cannot honour the recipe.

    Examples
    --------
    >>> model = accelerate_vlm(model, "divprune", retain=0.25)
    >>> tokens = model.generate(**inputs, max_new_tokens=4)
    >>> model.mmaccel.stats()
    196 -> 49 visual tokens (25 %), KV ... -> ... KiB...
    >>> tokens = model.generate(**inputs, max_new_tokens=4, mmaccel={"retain": 0.1})  # for this call
    >>> model.mmaccel.stats().visual_tokens_kept
    20
    >>> tokens = model.generate(**inputs, max_new_tokens=4, mmaccel=False)  # the bare model
    >>> model.mmaccel.stats()["visual_tokens_kept"]
    196

    Methods with options, one after the other; the model is accelerated anew:

    >>> from mmaccel import FastV, KIVI
    >>> model = accelerate_vlm(model, ["divprune", FastV(layer=3), KIVI(bits=4)], retain=0.1)
    >>> model.mmaccel
    <mmaccel on llava: divprune+fastv+kivi (divprune 9.8 %; fastv 10 %, layer=3; kivi, bits=4)>
    >>> model.mmaccel.remove()
    """
    draft, options = draft_of_call(recipe, lossless, draft, options)
    chosen = get_recipe(
        recipe,
        retain=retain,
        positions=positions,
        variant=variant,
        text_retain=text_retain,
        proportional=proportional,
        chunk=chunk,
        frames_at_once=frames_at_once,
        **options,
    )
    target = _model(model)
    warn_of_another(target, chosen)
    drafts = Drafts(lossless, with_tuned_layers(draft, lossless, chosen), lookup)
    net = Fallback.of(fallback, chosen)
    drafts.check(chosen, processor, net is not None)
    exchange(Accelerator.on(target), lambda: Accelerator(target, chosen, processor, kernels, drafts, net, offload))
    if (caution := target.mmaccel.plan.caution) is not None:
        warnings.warn(f"{caution}.", stacklevel=2)
    return model


def accelerated(
    model: M,
    recipe: RecipeLike = "balanced",
    *,
    retain: float | None = None,
    processor: Any = None,
    positions: Positions | None = None,
    variant: Variant | None = None,
    text_retain: float | None = None,
    proportional: Proportional | None = None,
    chunk: int | None = None,
    frames_at_once: int | None = None,
    kernels: Kernels = "auto",
    offload: Offload | None = None,
    lossless: bool = False,
    draft: Any = None,
    lookup: bool | str = False,
    fallback: FallbackLike = None,
    **options: Any,
) -> AbstractContextManager[M]:
    """:func:`accelerate_vlm` for the length of a ``with`` block; afterwards the model is what it was before, bare or
    accelerated in another way.

    Examples
    --------
    >>> with accelerated(model, "fastv", retain=0.5):
    ...     tokens = model.generate(**inputs, max_new_tokens=4)
    >>> is_accelerated(model)
    False
    """
    given: dict[str, Any] = {"retain": retain, "positions": positions, "variant": variant, "text_retain": text_retain}
    given |= {"proportional": proportional, "chunk": chunk, "frames_at_once": frames_at_once}
    given |= {"processor": processor, "kernels": kernels, "offload": offload, **options}
    given |= {"lossless": lossless, "draft": draft, "lookup": lookup, "fallback": fallback}
    return restored(lambda: accelerate_vlm(model, recipe, **given), lambda: Accelerator.on(_model(model)))


def is_accelerated(model: Any) -> bool:
    """Whether :func:`accelerate_vlm` is in force on ``model``.

    Examples
    --------
    >>> is_accelerated(model)
    False
    >>> is_accelerated(accelerate_vlm(model))
    True
    """
    handle = getattr(model, "mmaccel", None)
    return isinstance(handle, Accelerator) and handle.attached


def handle(model: nn.Module) -> Accelerator:
    """The handle ``model.mmaccel`` of an accelerated model, with its type for type checkers and editors.

    Raises
    ------
    MmaccelError
        If it is not a model, or not accelerated by :func:`accelerate_vlm`; the handle of an image encoder is
        ``EncoderAccelerator.on(encoder)``.

    Examples
    --------
    >>> model = accelerate_vlm(model, "divprune", retain=0.25)
    >>> tokens = model.generate(**inputs, max_new_tokens=4)
    >>> handle(model).stats().visual_tokens_kept
    49
    >>> handle(model).remove()
    """
    found = Accelerator.on(_model(model))
    if found is not None:
        return found
    kind = type(model).__name__
    if isinstance(getattr(model, "mmaccel", None), Handle):
        raise MmaccelError(f"This {kind} is an accelerated encoder; get its handle by EncoderAccelerator.on(encoder).")
    raise MmaccelError(f"This {kind} is not accelerated; call mmaccel.accelerate_vlm(model) first.")


__all__ = ["Accelerator", "accelerate_vlm", "accelerated", "handle", "is_accelerated"]
