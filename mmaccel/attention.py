"""The attention functions mmaccel registers: they delegate to what the model had, and see queries and keys on the way.

One for language models: it builds the mask from where every stored key came from, scores keys when a method asks, and
lets the cache evict after the layer's attention has run. One for vision towers: it serves the taps and weighs merged
tokens. Both are registered once per underlying implementation, under names without "flash" (transformers matches such names
by substring), and find their call through the call scope, never through a module attribute. Outside a call they are
the function they delegate to.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .kv.decoding import attend, reads_as_stored
from .scope import current

Attention = Callable[..., tuple[Tensor, Tensor | None]]
#: what a model may have been loaded with
BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")


def register(base: str, kind: str) -> str:
    """Register the ``text`` or ``vision`` function on top of implementation ``base``; returns its name."""
    name = f"mmaccel_{kind}_{base}".replace("flash_attention", "fa").replace("flash", "fa")
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        function = {"text": _text_attention, "vision": _vision_attention}[kind]
        AttentionInterface.register(name, functools.partial(function, base))
        AttentionMaskInterface.register(name, functools.partial(_mask, base))
    return name


def base_function(base: str, module: nn.Module) -> Attention:
    """The implementation called ``base``; eager attention is defined beside each model."""
    if base == "eager":
        function: Attention = sys.modules[type(module).__module__].eager_attention_forward
        return function
    function = ALL_ATTENTION_FUNCTIONS[base]
    return functools.partial(_flash, base, function) if "flash" in base else function


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
    if scope is not None and scope.step is not None:
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
    step = scope.step if scope is not None else None
    number = getattr(module, "layer_idx", None)
    if step is None or number is None:
        return base_function(base, module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    phase, index = step.phase(number), step.index(number)
    window = kwargs.get("sliding_window")
    visible = index.mask(phase.places, window)
    if visible is not None:
        # layers may be spread over devices
        visible = visible.to(query.device, non_blocking=True)
    groups = query.shape[1] // key.shape[1]
    if reads_as_stored(step, number, query):
        assert step.state is not None
        layer = step.state.layers[number]
        if base != "eager":
            read = attend(layer, query, visible, scaling)
            step.after_attention(number, query, key, visible, scaling)
            return read, None
        # eager attention returns its weights
        key, value = layer.stored()
    if "flash" in base:
        # flash attention aligns causal masks to the lower right and takes padding as [B, K]: enough unless heads
        # store different keys, or a window would count stored instead of original places
        kwargs.pop("position_ids", None)
        padding = None
        if visible is not None:
            if index.index.dim() == 3 or (window is not None and index.upto > window):
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
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    out = base_function(base, module)(module, query, key, value, mask, scaling=scaling, **kwargs)
    step.after_attention(number, query, key, visible, scaling)
    return out


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
    if scope is not None and encoded is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        weighed = scope.owner.taps.see(encoded, module, query, key, attention_mask, scale)
        if weighed is not attention_mask and "flash" in base:
            # flash attention cannot add the weight of merged tokens to its logits
            base = "sdpa"
        attention_mask = weighed
    return base_function(base, module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
