"""The attention functions mmaccel registers: they delegate to what the model had, and see queries and keys on the way.

One for language models: it builds the mask from where every stored key came from, scores keys when a method asks, and
lets the cache evict after the layer's attention has run. One for vision towers: it serves the taps and weighs merged
tokens. Both are registered once per underlying implementation, under names without "flash" (transformers matches such names
by substring), and find their call through the call scope, never through a module attribute. Outside a call they are
the function they delegate to.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from mmaccel_kernels.chosen import chosen_attention
from torch import Tensor, nn

from ...core.precision import in_attention_dtype, without_autocast
from ...errors import UnsupportedError
from ...kv.decoding import attend, reads_as_stored
from ...transformers_api import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
)
from ..cache.sparse_read import packed_read
from ..prompt.preview import Behind
from .call import current

Attention = Callable[..., tuple[Tensor, Tensor | None]]
#: what a model may have been loaded with; everything else that :meth:`Plug.check_backend` lets pass is flash attention
BACKENDS = ("eager", "sdpa")


def is_flash(base: str) -> bool:
    """Whether implementation ``base`` is called as flash attention is: versions 2 to 4, and kernels of the hub that
    transformers loads in their place or by their own names, such as ``kernels-community/flash-attn2``."""
    function = ALL_ATTENTION_FUNCTIONS.get(base)
    return function is not None and function is ALL_ATTENTION_FUNCTIONS.get("flash_attention_2")


@functools.cache
def register(base: str, kind: str) -> str:
    """Register the ``text`` or ``vision`` function on top of implementation ``base``; returns its name."""
    # a name with "/", "@" or ":" is one of a kernel on the hub
    name = re.sub(r"\W", "_", f"mmaccel_{kind}_{base}".replace("flash_attention", "fa").replace("flash", "fa"))
    function = {"text": _text_attention, "vision": _vision_attention}[kind]
    AttentionInterface.register(name, functools.partial(function, base))
    AttentionMaskInterface.register(name, functools.partial(_mask, base))
    _BASES[name] = base
    return name


#: the name of every function that was registered -> the implementation below it
_BASES: dict[str, str] = {}


class _Plugged:
    """Mixed into the class of a config: the same config, seen by modules whose attention function is ours.

    It shares every attribute with the ``_plain`` config except for the name of the attention implementation, which follows
    that of the plain one. The plain one stays what it was, so that other models may be built from it, and the modules of a
    model that was plugged are the only ones that know.
    """

    __slots__ = ()
    _plain: Any
    _kind: str

    @property
    def _attn_implementation(self) -> str:
        base: str = self._plain._attn_implementation
        return register(base, self._kind) if base in BACKENDS or is_flash(base) else base

    def __setattr__(self, name: str, value: Any) -> None:
        # whoever copies the name from here means the implementation below
        setattr(self._plain, name, _BASES.get(value, value) if isinstance(value, str) else value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)


@functools.cache
def _plugged_class(plain: type, kind: str) -> type:
    # transformers finds model classes by the name of the config's class
    body = {"__slots__": ("_plain",), "_kind": kind, "__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Plugged, plain), body)


class Plug:
    """Our attention function on all modules of one text model or vision tower, on top of whatever implementation its config
    names, now or later.

    Raises
    ------
    UnsupportedError
        If the config names an implementation that is neither one of :data:`BACKENDS` nor flash attention.
    """

    def __init__(self, root: nn.Module, kind: Literal["text", "vision"]) -> None:
        self._plugged: dict[int, Any] = {}
        self._modules: list[tuple[nn.Module, Any]] = []
        for module in root.modules():
            config = getattr(module, "config", None)
            if not isinstance(config, PreTrainedConfig):
                continue
            config = getattr(config, "_plain", config)
            if id(config) not in self._plugged:
                made: Callable[..., type] = _plugged_class
                plugged: Any = object.__new__(made(type(config), kind))
                object.__setattr__(plugged, "_plain", config)
                object.__setattr__(plugged, "__dict__", vars(config))
                self._plugged[id(config)] = plugged
            self._modules.append((module, config))
        # asked before every forward
        self._seen = [(module, self._plugged[id(config)]) for module, config in self._modules]
        self._configs = list({id(config): config for _, config in self._modules}.values())
        self.check_backend()
        self.on()

    def on(self) -> None:
        """Plug it in."""
        for module, config in self._modules:
            module.config = self._plugged[id(config)]

    def off(self) -> None:
        """Give every module the config it had."""
        for module, config in self._modules:
            module.config = config

    def bases(self) -> list[tuple[Any, str]]:
        """The configs, and the implementation that each names."""
        return [(config, config._attn_implementation) for config in self._configs]

    def check_backend(self) -> None:
        """Raise when the config names what mmaccel cannot build on."""
        for _, base in self.bases():
            if base not in BACKENDS and not is_flash(base):
                raise UnsupportedError(
                    f"mmaccel cannot build on attn_implementation={base!r}, only on eager, sdpa and flash attention; load the "
                    'model with attn_implementation="sdpa".'
                )

    def check(self) -> None:
        """Raise when a module no longer has the config that was plugged in, or that names what mmaccel cannot build on."""
        for module, plugged in self._seen:
            if module.config is not plugged:
                raise UnsupportedError(
                    "The config of this model's attention was replaced after accelerate_vlm; call accelerate_vlm(model, ...) "
                    "again."
                )
        self.check_backend()


def base_function(base: str, module: nn.Module) -> Attention:
    """The implementation called ``base``; eager attention is defined beside each model."""
    if base == "eager":
        function: Attention = sys.modules[type(module).__module__].eager_attention_forward
        return function
    function = ALL_ATTENTION_FUNCTIONS[base]
    return functools.partial(_flash, base, function) if base not in BACKENDS else function


def _flash(
    base: str, function: Attention, module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Flash attention looks for its kernels by the name in the module's config, which is ours now."""
    return function(_As(module, config=_As(module.config, _attn_implementation=base)), *args, **kwargs)


class _As:
    """An object with some attributes replaced."""

    def __init__(self, thing: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _thing=thing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)


def _mask(base: str, *args: Any, **kwargs: Any) -> Any:
    """No mask while mmaccel shapes the forward (the attention function makes it), else what ``base`` would make."""
    scope = current()
    if scope is not None and scope.stages is not None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **kwargs)


def _text_attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    scope = current()
    stages = scope.stages if scope is not None else None
    number = getattr(module, "layer_idx", None)
    if scope is not None and number is not None:
        query, key, value = in_attention_dtype(query, key, value)
    if scope is not None and scope.pinned is not None and number is not None:
        # a captured step
        pinned = scope.pinned.layers[number]
        pinned.ask(query)
        if not pinned.masked:
            with without_autocast(query.device):
                scale = query.shape[-1] ** -0.5 if scaling is None else scaling
                return pinned.attend(query.to(pinned.keys.dtype), scale), None
        attention_mask = pinned.end.visible if pinned.end.added is None else pinned.end.added
        attention_mask = None if attention_mask is None else _for_heads(attention_mask, query.shape[1] // key.shape[1])
    if scope is not None and scope.preview is not None and number is not None:
        if isinstance(scope.preview, Behind):
            key, value, seen = scope.preview.attend(number, query, key, value, kwargs.get("sliding_window"))
            return _masked(base, module, query, key, value, seen, scaling=scaling, **kwargs)
        scope.preview.see(number, query, key, scaling)
        if scope.preview.visible is not None:
            shown = scope.preview.visible(number, kwargs.get("sliding_window"))
            if shown is not None:
                return _masked(base, module, query, key, value, shown, scaling=scaling, **kwargs)
        stages = None
    if stages is None or number is None:
        return base_function(base, module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    forward = stages.forward
    family = forward.plan.family
    ahead = family.is_bidirectional(number)
    # from here on as the cache counts
    number = family.stored_from(number)
    phase, index = forward.phase(number), forward.index(number)
    together = phase.together if ahead else None
    window = kwargs.get("sliding_window")
    layer = forward.state.layers[number] if forward.state is not None else None
    if layer is not None:
        layer.window = window
    as_stored = layer is not None and reads_as_stored(layer, forward.incoming, query)
    if layer is not None and as_stored and base == "eager":
        # eager attention returns its weights
        query, key, value = in_attention_dtype(query, *layer.stored())
        as_stored = False
    visible = None
    # of what is read as it is stored the newest token sees everything, wherever heads end
    if layer is None or not as_stored or query.shape[2] > 1 or index.windowed(window) or not layer.gapless:
        visible = index.mask(phase.places, window, together)
    if visible is not None:
        # layers may be spread over devices
        visible = visible.to(query.device, non_blocking=True)
    chosen = None
    if stages.eviction is not None:
        with without_autocast(query.device):
            chosen = stages.eviction.read(number, query, None if as_stored else key, scaling)
    if layer is not None and as_stored:
        pages = packed_read(layer, chosen) if chosen is not None and visible is None else None
        if chosen is None or pages is not None:
            read = attend(layer, query.to(layer.keys.dtype), visible, scaling, pages=pages)
            stages.after_attention(number, query, key, visible, scaling, window)
            return read, None
        query, key, value = in_attention_dtype(query, *layer.stored())
    groups = query.shape[1] // key.shape[1]
    if chosen is not None and base != "eager":
        read, _ = chosen_attention(query, key, value, chosen, scaling=scaling, visible=visible)
        stages.after_attention(number, query, key, visible, scaling, window)
        return read.transpose(1, 2), None
    if chosen is not None:
        # eager attention returns its weights, of everything that is stored
        visible = chosen.mask(key.shape[2]) if visible is None else chosen.mask(key.shape[2]) & visible
    if forward.incoming.weights is not None:
        # flash attention takes nothing that is added to its logits
        base = "eager" if base == "eager" else "sdpa"
        added = index.weighed(forward.incoming.weights, visible, query.shape[2])
        mask: Tensor | None = _for_heads(added, groups).to(query.dtype)
    elif base not in BACKENDS:
        # flash attention aligns causal masks to the lower right and takes padding as [B, K]: enough unless heads store
        # different keys, a window would count stored instead of original places, or tokens look ahead or come back
        kwargs.pop("position_ids", None)
        if query.shape[2] < key.shape[2]:
            # what follows a prompt is causal, though the prompt may not be and its modules say so
            kwargs["is_causal"] = True
        padding = None
        if visible is not None:
            scattered = together is not None or phase.back is not None
            # keys that are picked out are padded behind the last ones, which flash attention takes for those of the queries
            scattered |= query.shape[2] > 1 and forward.incoming.sparse(number) is not None
            if index.of_heads or index.windowed(window) or scattered:
                base, padding = "sdpa", _for_heads(visible, groups)
            elif index.padded:
                padding = (index.index >= 0).to(query.device, non_blocking=True)
        mask = padding
    else:
        mask = None if visible is None else _for_heads(visible, groups)
        if mask is None and base == "eager" and query.shape[2] > 1:
            # eager attention is causal by its mask alone; without one all keys are those of the queries
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
        if mask is not None and base == "eager":
            mask = _added(mask, query.dtype)
    attended, plain = None, forward.incoming.weights is None and getattr(module, "is_causal", True)
    if plain and base == "sdpa" and stages.eviction is not None:
        attended = stages.eviction.attend(number, query, key, value, visible, scaling, window)
    if attended is not None:
        out: tuple[Tensor, Tensor | None] = attended, None
    else:
        out = base_function(base, module)(module, query, key, value, mask, scaling=scaling, **kwargs)
    stages.after_attention(number, query, key, visible, scaling, window)
    return out


def _masked(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries to what is ``visible [B, 1 or Hkv, q, K]``, in a pass that stores nothing."""
    seen = _for_heads(visible, query.shape[1] // key.shape[1])
    base, seen = ("eager", _added(seen, query.dtype)) if base == "eager" else ("sdpa", seen)
    return base_function(base, module)(module, query, key, value, seen, **kwargs)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What eager attention adds to its logits, of a ``mask`` that says who sees what."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _for_heads(mask: Tensor, groups: int) -> Tensor:
    """``[B, 1 or Hkv, q, K]`` for query heads."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(groups, dim=1)


def _vision_attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    # Qwen towers pass it by this name
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    scope = current()
    encoded = scope.encoding if scope is not None else None
    if scope is None or encoded is None:
        return base_function(base, module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def attended(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        with without_autocast(query.device):
            weighed = scope.taps.see(encoded, module, query, key, mask, scale)
        # flash attention cannot add the weight of merged tokens to its logits
        name = "sdpa" if weighed is not mask and base not in BACKENDS else base
        return base_function(name, module)(module, query, key, value, weighed, scaling=scaling, **kwargs)

    towers = scope.taps.towers
    if not towers.one_call:
        return attended(query, key, value, attention_mask, **kwargs)
    # a call a frame needs neither the mask nor the positions that keep frames apart
    kwargs = {name: kwargs[name] for name in ("dropout",) if name in kwargs}
    lengths = encoded.lengths(towers)
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    made = [attended(q, k, v, None, **kwargs)[0] for q, k, v in parts if q.shape[2]]
    return torch.cat(made, 1), None
