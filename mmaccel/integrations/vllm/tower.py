"""Methods in vLLM's own vision towers: taps, and the hooks of the runtime for transformers on the layers that vLLM has built.

Queries and keys are read where they enter attention. Merged tokens and padding give attention a mask, which vLLM's does not
take; where there is one, torch computes the attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...families import Family
from ...families.grids import PackedGrids
from ...runtime.call.plan import ModelPlan
from ...runtime.call.vision_output import VisionOutput
from ...runtime.tower.encoder_merging import EncoderMerging
from ...runtime.tower.patch_pruning import LayerPruning
from ...runtime.tower.rebuilding import Rebuilding
from ...runtime.tower.taps import Taps
from .architectures import Architecture

#: returns the encoder call that is running
Current = Callable[[], VisionOutput | None]
#: what vLLM calls the two parts of ``position_embeddings``
_ROTARY = ("rotary_pos_emb_cos", "rotary_pos_emb_sin")


def hook(taps: Taps, layers: list[nn.Module], current: Current, every: bool = False) -> None:
    """Let ``taps`` observe ``layers``; the attention of ``every`` one where a method works between them."""
    for number, layer in enumerate(layers):
        kinds = taps.layers.get(number, set())
        if every or kinds - {"features"}:
            attention: Any = next(m for m in layer.modules() if type(m).__name__ == "MMEncoderAttention")
            taps.numbers[id(attention)] = number
            attention.forward = partial(_attend, taps, current, attention, attention.forward)
        if "features" in kinds:
            hookable(layer).register_forward_hook(partial(_see_features, taps, current, number))


def work_inside(plan: ModelPlan) -> None:
    """Hook the methods of a plan that work between the layers of the tower; its ``towers`` are :func:`built`."""
    if plan.patches is not None:
        LayerPruning(plan, _keep)
    if plan.encoder is not None:
        EncoderMerging(plan, plan.encoder, _keep, language=True)
    if plan.rebuilding is not None:
        Rebuilding(plan, plan.rebuilding, _keep)


def built(family: Family, architecture: Architecture, model: nn.Module) -> Family:
    """The family of a description with the tower of vLLM's ``model``."""
    packed, tower = isinstance(family, PackedGrids), architecture.tower(model)
    adapted: Callable[[nn.Module], Any] = PackedModule if packed else hookable
    layers: list[Any] = [adapted(layer) for layer in architecture.tower_layers(model)]
    # methods count layers that vLLM does not build, as nothing reads them
    layers += [None] * (family.tower_depth - len(layers))
    made = copy.copy(family)
    vars(made).update(
        towers=lambda: [tower],
        tower_layers=lambda _: layers,
        readers=lambda _: [adapted(reader) for reader in family.readers(tower)],
        second_half=lambda layer: _second_half(family, layer) if packed else family.second_half(layer),
    )
    return made


def hookable(module: nn.Module) -> nn.Module:
    """A module of vLLM's with hooks that work: where one may be compiled, vLLM calls its ``forward`` past them."""
    kind = type(module)
    if kind.__call__ is not nn.Module.__call__:
        module.__class__ = type(kind.__name__, (kind,), {"__call__": nn.Module.__call__})
    return module


def _keep(*handles: Any) -> None:
    """Hooks stay as long as the model."""


class PackedModule:
    """A module of a tower with a packed sequence, whose hooks are given ``[S, C]`` and the arguments that transformers has.

    In vLLM the sequence is ``[S, 1, C]``, with the axis of the batch in the middle.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = hookable(module)

    def register_forward_pre_hook(self, hook: Callable[..., Any], with_kwargs: bool = False) -> Any:
        """As that of ``nn.Module``."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args = args[0][:, 0], *args[1:]
            made = hook(module, args, _as_transformers(kwargs)) if with_kwargs else hook(module, args)
            if made is None:
                return None
            args, kwargs = (made[0], _as_vllm(made[1])) if with_kwargs else (made, kwargs)
            return (args[0][:, None], *args[1:]), kwargs

        return self.module.register_forward_pre_hook(before, with_kwargs=True)

    def register_forward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """As that of ``nn.Module``."""

        def behind(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            made = hook(module, args, output[:, 0])
            return None if made is None else made[:, None]

        return self.module.register_forward_hook(behind, prepend=prepend)


class AddingNorm(PackedModule):
    """A norm of such a tower that is given the output of attention beside the input of the layer, and returns their sum behind
    the normalised one; hooks see the sum."""

    def register_forward_pre_hook(self, hook: Callable[..., Any], with_kwargs: bool = False) -> Any:
        """As that of ``nn.Module``."""
        sums: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "residual" not in kwargs:
                made = hook(module, (args[0][:, 0],))
                return None if made is None else ((made[0][:, None],), kwargs)
            total = args[0] + kwargs["residual"]
            made = hook(module, (total[:, 0],))
            if made is None:
                return None
            sums.append(total)
            return (made[0][:, None],), {}

        def behind(module: nn.Module, args: Any, output: Any) -> Any:
            return (output, sums.pop()) if sums else None

        self.module.register_forward_hook(behind)
        return self.module.register_forward_pre_hook(before, with_kwargs=True)


def _second_half(family: Family, layer: PackedModule) -> tuple[AddingNorm, PackedModule]:
    norm, mlp = family.second_half(layer.module)
    return AddingNorm(norm), PackedModule(mlp)


def _as_transformers(kwargs: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in kwargs.items() if name not in _ROTARY}
    return {**rest, "position_embeddings": tuple(kwargs[name] for name in _ROTARY)}


def _as_vllm(kwargs: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in kwargs.items() if name != "position_embeddings"}
    return {**rest, **dict(zip(_ROTARY, kwargs["position_embeddings"], strict=True))}


def _attend(
    taps: Taps, current: Current, module: Any, attend: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """The forward of one ``MMEncoderAttention``; ``attend`` is its own."""
    if (encoded := current()) is None:
        return attend(*args, **kwargs)
    given = dict(zip(("query", "key", "value", "cu_seqlens"), args, strict=False)) | kwargs
    query, key, value = (_heads(given[name], module.num_heads) for name in ("query", "key", "value"))
    bounds = given.get("cu_seqlens")
    parts = [slice(*ends) for ends in pairwise([0, query.shape[2]] if bounds is None else bounds.tolist())]
    seen = [(query[:, :, part], key[:, :, part], value[:, :, part]) for part in parts]
    masks = [taps.see(encoded, module, q, k, None, module.scale) for q, k, _ in seen]
    if all(mask is None for mask in masks):
        return attend(*args, **kwargs)
    made = [
        scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=module.scale)
        for (q, k, v), mask in zip(seen, masks, strict=True)
    ]
    shape: torch.Size = given["query"].shape
    return torch.cat(made, 2).transpose(1, 2).reshape(shape)


def _see_features(taps: Taps, current: Current, number: int, module: nn.Module, args: Any, output: Any) -> None:
    if (encoded := current()) is not None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        # Qwen's towers have the axis of the batch, of length one, in the middle
        taps.see_features(encoded, number, hidden.transpose(0, 1) if hidden.shape[1] == 1 else hidden)


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[N, T, H * d]`` or ``[N, T, H, d]`` as ``[N, H, T, d]``."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
