"""Our attention functions on the modules of a model, on top of whatever implementation it was loaded with.

A function is registered once for each implementation below it, under a name without "flash" (transformers matches such names
by substring), and finds its call through the context, never through a module attribute. Outside a call it is the function
below it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...core.transformers_api import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
)
from ...errors import UnsupportedError
from .call import current

Attention = Callable[..., tuple[Tensor, Tensor | None]]
#: implementations that are called as they are; all others that pass :meth:`AttentionPatch.check_backend` are flash attention
BACKENDS = ("eager", "sdpa")


def is_flash(base: str) -> bool:
    """Whether implementation ``base`` is called as flash attention is: versions 2 to 4, and kernels of the hub that
    transformers loads in their place or by their own names, such as ``kernels-community/flash-attn2``."""
    function = ALL_ATTENTION_FUNCTIONS.get(base)
    return function is not None and function is ALL_ATTENTION_FUNCTIONS.get("flash_attention_2")


@dataclass(frozen=True)
class AttentionKind:
    """One of our attention functions: its name, and the function, whose first argument is the implementation below it."""

    name: str
    function: Attention


@functools.cache
def register(base: str, kind: AttentionKind) -> str:
    """Register a function of ours on top of implementation ``base``; returns its name."""
    # a name with "/", "@" or ":" is one of a kernel on the hub
    name = re.sub(r"\W", "_", f"mmaccel_{kind.name}_{base}".replace("flash_attention", "fa").replace("flash", "fa"))
    AttentionInterface.register(name, functools.partial(kind.function, base))
    AttentionMaskInterface.register(name, functools.partial(_mask, base))
    _BASES[name] = base
    return name


def _mask(base: str, *args: Any, **kwargs: Any) -> Any:
    """No mask while mmaccel shapes the forward (the attention function makes it), else the mask of ``base``."""
    call = current()
    if call is not None and call.text.runs is not None and call.observer is None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **kwargs)


#: the name of every function that was registered -> the implementation below it
_BASES: dict[str, str] = {}


class _Patched:
    """Mixed into the class of a config: the same config, seen by modules whose attention function is ours.

    It shares every attribute with the ``_plain`` config except for the name of the attention implementation, which follows
    that of the plain one. The plain one stays what it was, so that other models may be built from it, and the modules of a
    model that was patched are the only ones that know.
    """

    __slots__ = ()
    _plain: Any
    _kind: AttentionKind

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
def _patched_class(plain: type, kind: AttentionKind) -> Any:
    # transformers finds model classes by the name of the config's class
    body = {"__slots__": ("_plain",), "_kind": kind, "__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Patched, plain), body)


class AttentionPatch:
    """Our attention function on all modules of one text model or vision tower, on top of whatever implementation its config
    names, now or later; refuses one that is neither one of :data:`BACKENDS` nor flash attention."""

    def __init__(self, root: nn.Module, kind: AttentionKind) -> None:
        self._patched: dict[int, Any] = {}
        self._modules: list[tuple[nn.Module, Any]] = []
        for module in root.modules():
            config = getattr(module, "config", None)
            if not isinstance(config, PreTrainedConfig):
                continue
            config = getattr(config, "_plain", config)
            if id(config) not in self._patched:
                patched: Any = object.__new__(_patched_class(config.__class__, kind))
                object.__setattr__(patched, "_plain", config)
                object.__setattr__(patched, "__dict__", vars(config))
                self._patched[id(config)] = patched
            self._modules.append((module, config))
        # asked before every forward
        self._seen = [(module, self._patched[id(config)]) for module, config in self._modules]
        self._configs = list({id(config): config for _, config in self._modules}.values())
        self.check_backend()
        self.on()

    def on(self) -> None:
        """Use our function."""
        for module, config in self._modules:
            module.config = self._patched[id(config)]

    def off(self) -> None:
        """Give every module the config it had."""
        for module, config in self._modules:
            module.config = config

    def bases(self) -> list[tuple[Any, str]]:
        """The configs, and the implementation that each names."""
        return [(config, config._attn_implementation) for config in self._configs]

    def check_backend(self) -> None:
        """Raise when the config names an implementation that mmaccel cannot build on."""
        for _, base in self.bases():
            if base not in BACKENDS and not is_flash(base):
                raise UnsupportedError(
                    f"mmaccel cannot build on attn_implementation={base!r}, only on eager, sdpa and flash attention; load the "
                    'model with attn_implementation="sdpa".'
                )

    def check(self) -> None:
        """Raise when a module no longer has its patched config, or the backend is one that mmaccel cannot build on."""
        for module, patched in self._seen:
            if module.config is not patched:
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
