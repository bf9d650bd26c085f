"""Operations and bytes of a model, counted as it runs, and the speed-ups that they promise.

An operation is a multiply-add times two. Counted are every ``nn.Linear`` by its rows, experts by the tokens that are routed to
them, and attention by the pairs of tokens that see each other (half a square if causal), padding included. Norms, activations
and the patch embedding are small and left out; so is selection, which is a cost and no promise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...families import family_of
from ...kv.cache import state_of
from ...method import Policy
from ...recipe import Recipe
from ...runtime.cache.sparse_read import first_layer


@dataclass
class Operations:
    """Operations of a prefill: ``vision`` is towers and projectors, ``language`` the language model and its head."""

    vision: float = 0.0
    language: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.vision + self.language


def count_operations(model: Any, call: Callable[[], Any]) -> Operations:
    """Operations of ``call``, which must be one prefill of ``model``, bare or accelerated."""
    family, operations = family_of(model), Operations()
    inside = {id(module) for part in (family.text, model.lm_head) for module in part.modules()}

    def linear(module: Any, args: Any, output: Tensor) -> None:
        spent = 2.0 * module.in_features * output.numel()
        if id(module) in inside:
            operations.language += spent
        else:
            operations.vision += spent

    def experts(module: Any, args: Any, kwargs: Any) -> None:
        chosen = next(x for x in (*args, *kwargs.values()) if not x.is_floating_point())
        operations.language += 2.0 * _one_expert(module) * chosen.numel()

    def text_layer(number: int, module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        operations.language += 2.0 * family.attention_width(number) * hidden.shape[0] * hidden.shape[1] ** 2

    def tower_layer(module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        # packed pictures have their bounds in cu_seqlens
        packed = kwargs.get("cu_seqlens")
        if packed is None and hidden.dim() == 2:
            packed = next(x for x in args[1:] if isinstance(x, Tensor) and x.dim() == 1 and not x.is_floating_point())
        if packed is not None:
            pairs = float(packed.diff().double().square().sum())
        else:
            pairs = float(hidden.shape[0] * hidden.shape[1] ** 2)
        operations.vision += 4.0 * hidden.shape[-1] * pairs

    handles = [module.register_forward_hook(linear) for module in model.modules() if isinstance(module, nn.Linear)]
    handles += [
        family.text.layers[number].register_forward_pre_hook(functools.partial(text_layer, number), with_kwargs=True)
        for number in family.attending
    ]
    handles += [one.register_forward_pre_hook(experts, with_kwargs=True) for one in _experts(family.text)]
    for tower in family.towers():
        layers = family.tower_layers(tower)
        handles += [layer.register_forward_pre_hook(tower_layer, with_kwargs=True) for layer in layers]
    try:
        with torch.inference_mode():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return operations


def _experts(text: nn.Module) -> list[Any]:
    """The modules that hold the stacked matrices of the experts of a layer."""
    return [module for module in text.modules() if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)]


def _one_expert(module: Any) -> int:
    return int(module.gate_up_proj[0].numel() + module.down_proj[0].numel())


def weight_bytes(model: Any, skipped: Collection[int] = ()) -> int:
    """Bytes of weights that every decode step reads: the layers but for those that are ``skipped``, and the head, not the
    embeddings, and the experts of one token."""
    text = family_of(model).text
    layers = nn.ModuleList(layer for number, layer in enumerate(text.layers) if number not in skipped)
    held = sum(p.nbytes for p in {id(p): p for part in (layers, model.lm_head) for p in part.parameters()}.values())
    for module in _experts(layers):
        unread = len(module.gate_up_proj) - text.config.num_experts_per_tok
        held -= unread * _one_expert(module) * module.gate_up_proj.itemsize
    return held


def stored_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of a cache without spare room: of keys and values as they are stored, and of metadata (their origin, the state of
    policies, and the bias that packed keys lack)."""
    state = state_of(cache)
    if state is None:
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        return _once(x for layer in layers for x in (layer.keys, layer.values)), 0
    metadata = [*state.shared.tensors(), *(x for layer in state.layers for x in layer.schedule.tensors())]
    metadata += [layer.key_bias for layer in state.layers if layer.key_bias is not None]
    every = [*metadata, *(x for layer in state.layers for x in layer.tensors())]
    return _once(every) - _once(metadata), _once(metadata)


def _once(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum({(x.data_ptr(), x.nbytes): x.nbytes for x in tensors}.values())


def stored_tokens(cache: Any) -> float:
    """Tokens in a layer of a cache, over all rows; the mean of layers and heads where they differ."""
    state = state_of(cache)
    if state is None:
        held = [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None]
        counts = [float(len(keys) * keys.shape[2]) for keys in held]
    else:
        counts = [float(layer.index.lengths.double().mean(1).sum()) for layer in state.layers if not layer.empty]
    return sum(counts) / max(1, len(counts))


def unread_bytes(model: Any, recipe: Recipe, stats: Mapping[str, Any], token: float) -> int:
    """Bytes of stored keys and values that a decode step does not read because a policy of the ``recipe`` selects keys, whose
    own reads are not counted. A stored ``token`` takes so many bytes in all layers."""
    depth, spared = len(family_of(model).attending), 0.0
    for _, method in recipe.build():
        if isinstance(method, Policy) and method.recalls:
            (stage,) = (one for one in stats["stages"] if one["method"] == method.name)
            unread = stage["tokens_in"] - stage["resolved"]
            spared += unread * token * (depth - first_layer(method, depth)) / depth
    return round(spared)


def promised_ttft(parts: dict[str, float], bare: Operations, fast: Operations) -> float:
    """The speed-up of the time to first token that operations promise: vision tower and prefill of the bare run, in ``parts``
    of seconds, shrink with their operations."""
    vision = fast.vision / bare.vision if bare.vision else 1.0
    shorter = parts["vision"] * (1 - vision) + parts["prefill"] * (1 - fast.language / bare.language)
    whole = sum(parts.values())
    return whole / (whole - shorter)


def promised_decode(weights: int, bare_kv: float, fast_kv: float) -> float:
    """The speed-up of decoding that bytes promise: a step reads the weights and the cache of all rows once."""
    return (weights + bare_kv) / (weights + fast_kv)
