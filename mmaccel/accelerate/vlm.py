"""The wrapper: :func:`accelerate_vlm`, its handle, and the context manager :func:`accelerated`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..core.layout import Layout
from ..core.reduction import Reduction
from ..core.stats import Stats
from ..errors import MmaccelError, UnsupportedError
from ..families import Family, family_of
from ..families.text import TextTower
from ..kv.codecs import Codec, kinds
from ..method import EncoderMethod, FramesMethod, LayerMethod, Method, Policy, TokenMethod
from ..recipe import Recipe, Stage
from ..recipe import recipe as find_recipe
from ..runtime.attention import Plug
from ..runtime.encoder import EncoderMerging
from ..runtime.hooks import Door, finish, show_dropped
from ..runtime.scope import Encoded, Passage, Scope, checked_kernels, current, pop, push
from ..runtime.taps import Taps

M = TypeVar("M", bound=nn.Module)


class Accelerator:
    """The handle ``model.mmaccel``: what was put on one model, its statistics, and the way back.

    Everything hangs on this one instance: hooks on its modules, wrapped methods in its ``__dict__``, and the config that its
    attention modules see. Nothing is patched on a class, and the model's own config stays as it was.
    """

    def __init__(self, model: Any, recipe: Recipe, processor: Any = None, kernels: str = "auto") -> None:
        self.recipe = recipe
        self.kernels = checked_kernels(kernels)
        self.processor = processor
        self.family: Family = family_of(model, processor)
        #: what is said in the statistics of every call
        self.notes: list[str] = []
        self.built = [(stage, self._fit(stage, method)) for stage, method in recipe.build()]
        for _, method in self.built:
            method.check(self.family)
        if any(m.site == "frames" for _, m in self.built) and getattr(processor, "mmaccel_recipe", None) is None:
            raise UnsupportedError(
                f"Recipe {recipe.name!r} works on pixels, which the model never sees; call "
                f"processor = prepare(processor, {recipe.name!r}), use that processor, and give it as processor=."
            )
        self.cuts = self._cuts()
        self.policy = next((i for i, (_, m) in enumerate(self.built) if isinstance(m, Policy)), None)
        self.kinds = kinds({i: m for i, (_, m) in enumerate(self.built) if isinstance(m, Codec)})
        self.encoder = next((i for i, (_, m) in enumerate(self.built) if isinstance(m, EncoderMethod)), -1)
        self.readers = {
            m.text_tower: self._reader(m) for _, m in self.built if isinstance(m, TokenMethod) and m.text_tower
        }
        #: whether anything happens between pixels and the cache
        self.active = any(m.site != "frames" for _, m in self.built)
        self._check_layers(model)
        self._check_generation(model.generation_config)
        self._model = model
        self._last: Scope | None = None
        self._restore: list[Callable[[], None]] = []
        self._plugs: list[Plug] = []
        try:
            self._attach(model)
        except BaseException:
            self.remove()
            raise

    # --- for the user -----------------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Figures of the last call, see :meth:`mmaccel.core.stats.Stats.as_dict`; empty before the first."""
        return {} if self._last is None else self._last.stats.as_dict()

    @property
    def layout(self) -> Layout | None:
        """The layout of the last prompt that had pictures."""
        return None if self._last is None else self._last.layout

    @property
    def reduction(self) -> Reduction | None:
        """What became of the places of the last prompt that had pictures, ``[B, S]``, over all prefill stages."""
        return None if self._last is None else self._last.reduction

    @property
    def trail(self) -> list[Passage]:
        """The same stage by stage, in the order in which they worked."""
        return [] if self._last is None else list(self._last.trail)

    def remove(self) -> None:
        """Make the model exactly what it was: hooks, methods, attention implementation, this handle."""
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()
        self._plugs.clear()
        self._drop_stale(None)

    @property
    def attached(self) -> bool:
        """Whether :meth:`remove` has not been called."""
        return bool(self._restore)

    @classmethod
    def on(cls, model: Any) -> Accelerator | None:
        """The handle that is in force on ``model``; None on a bare model.

        Raises
        ------
        UnsupportedError
            If ``model`` is a shallow copy, whose modules are those of the accelerated model it was made of.
        """
        handle = getattr(model, "mmaccel", None)
        if not isinstance(handle, cls) or not handle.attached:
            return None
        if handle._model is not model:
            raise UnsupportedError(
                "This model is a shallow copy of an accelerated one and shares its modules; call model.mmaccel.remove() first."
            )
        return handle

    def __reduce__(self) -> Any:
        # a copied or unpickled model would go on calling the wrapped methods of the model it came from
        raise UnsupportedError("An accelerated model cannot be copied or pickled; call model.mmaccel.remove() first.")

    def __repr__(self) -> str:
        return f"<mmaccel {self.recipe.name!r} on {self.family.name}>"

    # --- putting it on ----------------------------------------------------------------------------------------
    def _attach(self, model: Any) -> None:
        family, inner = self.family, self.family.inner
        encoder = self.built[self.encoder][1] if self.encoder >= 0 else None
        assert encoder is None or isinstance(encoder, EncoderMethod)
        self.taps = Taps(family, [tap for _, m in self.built for tap in m.taps()], self._hook)
        retain = self.built[self.encoder][0].retain if encoder else None
        self.merging = EncoderMerging(family, encoder, retain, self._hook, self.encoder, language=True)
        self.door = Door(self, self._hook)
        self._hook(inner.register_forward_pre_hook(self._note_inputs, with_kwargs=True))
        policy = None if self.policy is None else self.built[self.policy][1]
        if isinstance(policy, Policy) and policy.future:
            for layer in family.text.layers:
                last = getattr(layer.self_attn, "q_norm", None) or layer.self_attn.q_proj
                self._hook(last.register_forward_hook(self._note_queries))
        for module in (model, inner):
            self._hook(module.register_forward_pre_hook(self._open, with_kwargs=True, prepend=True))
            self._hook(module.register_forward_hook(self._close, with_kwargs=True, always_call=True))
        self._wrap(model, "generate", self._generate)
        self._wrap(model, "set_attn_implementation", self._set_attention)
        for modality in family.modalities:
            if hasattr(inner, f"get_{modality}_features"):
                self._wrap(inner, f"get_{modality}_features", functools.partial(self._encode, modality))
        if self.active:
            for target, name, wrapper in family.wrappers():
                self._wrap(target, name, functools.partial(_scoped, wrapper, self))
            for name in filter(functools.partial(hasattr, model), _CONTINUOUS):
                self._wrap(model, name, _no_continuous_batching)
            self._plug(family.text, "text")
            if self.taps.need_attention or encoder is not None:
                for tower in family.towers():
                    self._plug(tower, "vision")
        model.mmaccel = self
        self._restore.append(functools.partial(model.__dict__.pop, "mmaccel", None))

    def _note_queries(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Show the cache stage of a prompt the queries of a layer before RoPE."""
        scope = current(self)
        step = scope.step if scope is not None else None
        if step is not None and step.eviction is not None and step.layout is not None:
            step.eviction.unturned = output

    def _hook(self, *handles: Any) -> None:
        self._restore.extend(handle.remove for handle in handles)

    def _wrap(self, target: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Shadow a method on the instance; undoing it brings back whatever the instance had."""
        had, before = name in target.__dict__, target.__dict__.get(name)
        target.__dict__[name] = make(getattr(target, name))

        def undo() -> None:
            if had:
                target.__dict__[name] = before
            else:
                target.__dict__.pop(name, None)

        self._restore.append(undo)

    def _plug(self, root: nn.Module, kind: Literal["text", "vision"]) -> None:
        plug = Plug(root, kind)
        self._plugs.append(plug)
        self._restore.append(plug.off)

    def _set_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What the user sets goes below our attention function, and stays after :meth:`remove`."""

        @functools.wraps(original)
        def set_attn_implementation(*args: Any, **kwargs: Any) -> Any:
            before = [pair for plug in self._plugs for pair in plug.bases()]
            for plug in self._plugs:
                plug.off()
            try:
                result = original(*args, **kwargs)
                for plug in self._plugs:
                    plug.check_backend()
                return result
            except BaseException:
                for config, base in before:
                    config._attn_implementation_internal = base
                raise
            finally:
                for plug in self._plugs:
                    plug.on()

        return set_attn_implementation

    def check_attached(self) -> None:
        """Raise when something that :func:`accelerate_vlm` installed is no longer there; called before every forward."""
        for plug in self._plugs:
            plug.check()

    def _reader(self, method: TokenMethod) -> TextTower:
        """The text tower that a method names."""
        assert method.text_tower is not None
        if self.processor is None:
            raise UnsupportedError(f"{method.name} with a text tower reads the question as text; give processor=.")
        tower = TextTower.load(method.text_tower, next(self.family.inner.parameters()).device)
        if tower.width != (width := self.family.vision.hidden_size):
            raise UnsupportedError(
                f"{method.text_tower!r} was trained with a vision tower of width {tower.width}, but that of this "
                f"{self.family.name} model is {width} wide; name the CLIP model that it comes from."
            )
        return tower

    def _fit(self, stage: Stage, method: Method) -> Method:
        """The method with what depends on the model filled in; a default layer that is out of reach is moved."""
        fitted = method.fit(self.family)
        if not isinstance(fitted, LayerMethod) or "layer" in stage.options:
            return fitted
        near = fitted.within(self.family)
        if near is not fitted:
            self.notes.append(
                f"{method.name} works at layer {near.layer}: layer {fitted.layer}, its default, is out of reach in this model"
            )
        return near

    # --- checks -----------------------------------------------------------------------------------------------
    def _check_layers(self, model: Any) -> None:
        depth, least = len(self.family.text.layers), max(1, self.family.deepstack)
        for layer in self.cuts:
            if not least <= layer < depth:
                why = ", since its first layers add DeepStack features" if self.family.deepstack else ""
                raise UnsupportedError(
                    f"layer={layer} is out of reach: in this {self.family.name} model tokens can be dropped before layers "
                    f"{least} to {depth - 1}{why}; give layer={min(max(layer, least), depth - 1)}."
                )

    def _cuts(self) -> dict[int, int]:
        """Which stage works at which layer. Shares of the depth may fall together in a shallow model: of stages of one method
        the last counts, which keeps least."""
        cuts: dict[int, int] = {}
        for number, (_, method) in enumerate(self.built):
            if not isinstance(method, LayerMethod):
                continue
            layer, depth = int(method.layer), len(self.family.text.layers)
            if cuts and layer < max(cuts):
                raise MmaccelError(
                    f"Recipe {self.recipe.name!r}: in this model of {depth} layers {method.name!r} comes to work at layer "
                    f"{layer}, below the stage before it at layer {max(cuts)}; give rising layers."
                )
            if layer in cuts:
                before = self.built[cuts[layer]][1].name
                if before != method.name:
                    raise MmaccelError(
                        f"Recipe {self.recipe.name!r}: in this model of {depth} layers {before!r} and {method.name!r} both "
                        f"fall on layer {layer}; give them layers that differ."
                    )
                self.notes.append(
                    f"stages {cuts[layer]} and {number} ({method.name}) both fall on layer {layer} of {depth}: "
                    f"only stage {number} works"
                )
            cuts[layer] = number
        return cuts

    def _check_generation(self, *configs: Any) -> None:
        """Caches and prefill modes that cannot be honoured are refused, not quietly run in full; the first config that
        says something counts."""
        if not self.active:
            return

        def said(name: str) -> Any:
            values = (getattr(config, name, None) for config in configs)
            return next((value for value in values if value is not None), None)

        if (cache := said("cache_implementation")) not in (None, "dynamic"):
            raise UnsupportedError(
                f"cache_implementation={cache!r} cannot hold a reduced prompt; leave it out (a dynamic cache is used)."
            )
        if said("prefill_chunk_size"):
            raise UnsupportedError("prefill_chunk_size would reduce only the first chunk; leave it out.")
        if said("is_assistant"):
            raise UnsupportedError(
                "An accelerated model cannot draft for another one, which shows it no pictures; call "
                "assistant.mmaccel.remove() first."
            )
        self.check_cache(said("use_cache"))
        if (self.cuts or self.policy is not None) and (said("prompt_lookup_num_tokens") or said("assistant_model")):
            raise UnsupportedError(
                f"Assisted decoding puts candidates behind the prompt, and recipe {self.recipe.name!r} would take them for "
                "its end; leave out the assistant, or use a recipe that works before the language model."
            )

    def check_cache(self, use_cache: bool | None) -> None:
        """Raise when the recipe compresses a KV cache and there is to be none."""
        at_work = [m.name for _, m in self.built if isinstance(m, (Policy, Codec))]
        if use_cache is False and at_work:
            raise UnsupportedError(
                f"Recipe {self.recipe.name!r} compresses the KV cache ({', '.join(at_work)}), and use_cache=False makes none; "
                "leave out use_cache=False, or use a recipe that works before or inside the language model."
            )

    # --- while it runs ----------------------------------------------------------------------------------------
    def note_pictures(self, scope: Scope, ids: Tensor) -> None:
        """Say which methods of the recipe had nothing to choose from, where the prompt ``ids [B, S]`` has pictures."""
        choosers = [m.name for _, m in self.built if isinstance(m, FramesMethod) and m.only_chooses]
        if not choosers:
            return
        try:
            segments = self.family.layout(ids, torch.ones_like(ids, dtype=torch.bool), scope.encoded).segments
        except UnsupportedError:
            # what cannot be laid out cannot be reduced either, and is refused where that matters
            return
        clips = {s.picture for s in segments if s.modality == "video" or bool((s.tile.cells[:, 0] > 0).any())}
        if any(s.picture not in clips for s in segments):
            scope.stats.notes += [f"{name} chooses frames of clips, and left pictures as they are" for name in choosers]

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if not self.attached:
                # a shallow copy of the model kept this method when the handle was removed
                return original(*args, **kwargs)
            config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
            self._check_generation(_Given(kwargs), config, self._model.generation_config)
            self._drop_stale(None)
            scope = Scope(self, Stats(self.recipe.name, notes=list(self.notes)), cache=kwargs.get("past_key_values"))
            push(scope)
            try:
                return original(*args, **kwargs)
            finally:
                pop(scope)
                self._finish(scope)

        return generate

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A direct forward opens a scope of its own; inside ``generate`` there is one already."""
        self._drop_stale(module)
        if current(self) is not None:
            return None
        scope = Scope(
            self, Stats(self.recipe.name, notes=list(self.notes)), opened_by=module, cache=kwargs.get("past_key_values")
        )
        push(scope)
        labels = kwargs.get("labels")
        if self.active and isinstance(labels, Tensor):
            scope.labels = labels.clone()
            return args, {**kwargs, "labels": scope.labels}
        return None

    def _drop_stale(self, module: nn.Module | None) -> None:
        """A forward that was interrupted from the keyboard runs no hook at its end and leaves its scope open; it is stale
        when the same module, or ``generate`` (None), starts again."""
        scope = current(self)
        if scope is not None and scope.opened_by is not None and (module is None or scope.opened_by is module):
            pop(scope)

    def _close(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        scope = current(self)
        if scope is None or scope.opened_by is not module:
            return None
        pop(scope)
        dropped = scope.dropped
        self._finish(scope)
        if dropped is None or output is None:
            return None
        kept = kwargs.get("logits_to_keep", 0)
        if isinstance(output, tuple):
            # behind the loss, if there is one
            at = int(kwargs.get("labels") is not None)
            return (*output[:at], show_dropped(output[at], dropped, kept), *output[at + 1 :])
        output.logits = show_dropped(output.logits, dropped, kept)
        return output

    def _finish(self, scope: Scope) -> None:
        finish(scope)
        # what was needed only while the call ran must not keep tensors alive
        scope.encoded.clear()
        scope.cache = scope.labels = scope.step = scope.input_ids = scope.encoding = scope.dropped = None
        self._last = scope

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scope = current(self)
        if scope is None:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values")
        scope.input_ids = ids
        scope.cache = cache if cache is not None else scope.cache
        embeds = kwargs.get("inputs_embeds")
        if ids is None and embeds is not None and self.active and (cache is None or cache.get_seq_length() == 0):
            raise UnsupportedError(
                "With inputs_embeds mmaccel cannot tell visual tokens from text; pass input_ids and pixel values instead."
            )

    def _encode(self, modality: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def features(*args: Any, **kwargs: Any) -> Any:
            scope = current(self)
            if scope is None or scope.encoding is not None:
                return original(*args, **kwargs)
            scope.encoding = encoded = Encoded(dict(signature.bind(*args, **kwargs).arguments))
            try:
                with scope.stats.clock.measure("encoder", next(self.family.inner.parameters()).device):
                    output = original(*args, **kwargs)
            finally:
                scope.encoding = None
            made = output.pooler_output
            parts = [made] if isinstance(made, Tensor) else list(made)
            encoded.tokens = sum(part.numel() // part.shape[-1] for part in parts)
            scope.encoded[modality] = encoded
            return output

        return features


class _Given:
    """Generation arguments given to ``generate`` by keyword, read like a generation config."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self.cache_implementation = kwargs.get("cache_implementation")
        self.prefill_chunk_size = kwargs.get("prefill_chunk_size")
        self.prompt_lookup_num_tokens = kwargs.get("prompt_lookup_num_tokens")
        self.assistant_model = kwargs.get("assistant_model")
        self.use_cache = kwargs.get("use_cache")


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


def _scoped(wrapper: Any, owner: Accelerator, original: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = wrapper(original, functools.partial(current, owner))
    return made


def _base(model: Any) -> Any:
    """The model inside a PEFT model, else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accelerate_vlm(
    model: M,
    recipe: str | Path | Mapping[str, Any] | Recipe = "balanced",
    *,
    processor: Any = None,
    kernels: str = "auto",
    **overrides: Any,
) -> M:
    """Make a vision or video LLM skip visual tokens, in place.

    Parameters
    ----------
    model : a ``...ForConditionalGeneration`` model of a supported family (or a PEFT model around one). It keeps its class;
        a model that is accelerated already gets the new recipe instead.
    recipe : the name of a recipe or method, a path to a JSON file, a mapping, or a :class:`Recipe`.
    processor : needed by families whose prompt only the tokenizer can read (InternVL, SmolVLM: to know which tiles and
        frames belong together), and by methods that read the question as text.
    kernels : ``"auto"`` runs Triton kernels on GPUs on which they build; ``"off"`` runs their plain definitions for this model,
        whatever the device.
    **overrides : ``retain=`` (a float is the share of visual tokens to keep, an int their number per picture),
        ``positions=``, ``rounding=``, ``text_retain=``, or an option of one of the recipe's methods.

    Returns
    -------
    The same model. ``model.mmaccel`` is its :class:`Accelerator`: ``stats()``, ``recipe``, ``remove()``.

    Raises
    ------
    MmaccelError
        If the recipe, a budget, an option or ``kernels`` is of no use.
    UnsupportedError
        If the family, the attention implementation or the generation config cannot honour the recipe.
    """
    chosen = find_recipe(recipe).override(**overrides)
    target = _base(model)
    previous = Accelerator.on(target)
    if previous is not None:
        previous.remove()
    try:
        Accelerator(target, chosen, processor, kernels)
    except BaseException:
        if previous is not None:
            Accelerator(target, previous.recipe, previous.processor, previous.kernels)
        raise
    return model


@contextmanager
def accelerated(
    model: M,
    recipe: str | Path | Mapping[str, Any] | Recipe = "balanced",
    *,
    processor: Any = None,
    kernels: str = "auto",
    **overrides: Any,
) -> Iterator[M]:
    """:func:`accelerate_vlm` for the length of a ``with`` block; afterwards the model is what it was before, bare or
    accelerated in another way."""
    target = _base(model)
    previous = Accelerator.on(target)
    accelerate_vlm(model, recipe, processor=processor, kernels=kernels, **overrides)
    try:
        yield model
    finally:
        if (handle := Accelerator.on(target)) is not None:
            handle.remove()
        if previous is not None:
            Accelerator(target, previous.recipe, previous.processor, previous.kernels)


def is_accelerated(model: Any) -> bool:
    """Whether :func:`accelerate_vlm` is in force on ``model``."""
    handle = getattr(model, "mmaccel", None)
    return isinstance(handle, Accelerator) and handle.attached


__all__ = ["Accelerator", "accelerate_vlm", "accelerated", "is_accelerated"]
