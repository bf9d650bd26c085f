"""Adapters of stand-alone image encoders: CLIP and SigLIP of transformers, CLIP of open_clip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.nn.functional import linear

from ..core.budget import layer_at
from ..core.precision import without_autocast
from ..errors import UnsupportedError
from .tower import Towers


class Merging(Protocol):
    """Merging in one forward of a tower; see :class:`mmaccel.runtime.tower.merged.Merged`."""

    layer: int | None

    def attention(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """Note queries and keys; returns the mask that weighs merged tokens."""


class Encoder(Towers):
    """Adapter of one stand-alone tower; all its layers are read."""

    tower: Any

    def towers(self) -> list[Any]:
        return [self.tower]

    @property
    def feature_layer(self) -> int:
        return len(self.tower_layers(self.tower)) - 1

    def tap_layer(self, layer: float | None) -> int:
        """As Python counts; by default the last, and a float is a share of the depth."""
        depth = self.feature_layer + 1
        return range(depth)[self.feature_layer if layer is None else layer_at(layer, depth)]

    #: whether the tower's attention can be replaced as transformers has it; else :meth:`attach` hooks its modules
    attention_by_name: ClassVar[bool] = True

    def attach(self, needs_cls: bool, merging: Callable[[], Merging | None]) -> list[Callable[[], None]]:
        """Hook the attention of every layer for ``merging()``, the merge of the forward that is being run; returns the
        functions that undo it. ``needs_cls``: whether merging looks at the attention of the CLS token."""
        return []


class TransformersEncoder(Encoder):
    """Adapter of CLIP and SigLIP of transformers, whole or the vision half, with or without projection."""

    model_types = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")

    def __init__(self, model: Any) -> None:
        self.name = model.config.model_type
        self.tower = getattr(model, "vision_model", model)

    @property
    def has_cls(self) -> bool:
        """CLIP has one, SigLIP does not."""
        return self.name.startswith("clip")


class OpenClipEncoder(Encoder):
    """Adapter of the ``VisionTransformer`` of open_clip, alone or in a CLIP model."""

    name = "open_clip"
    has_cls = True
    attention_by_name = False
    attention_name = "attn"
    layers_path = "transformer.resblocks"

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        if not tower.transformer.batch_first:
            raise UnsupportedError("The open_clip tower has batch_first=False; create the model without that option.")

    def attach(self, needs_cls: bool, merging: Callable[[], Merging | None]) -> list[Callable[[], None]]:
        """Attach hooks before every attention, which keeps queries and keys to itself: they are projected once more, the keys
        to their mean over heads, unless the method needs them per head."""
        hook = functools.partial(_look, needs_cls, merging)
        layers = self.tower_layers(self.tower)
        undo = [self.attention_of(x).register_forward_pre_hook(hook, with_kwargs=True).remove for x in layers]
        # it would pass by the hooks of the tower, and its maps need the full grid behind every layer
        self.tower.__dict__["forward_intermediates"] = _no_intermediates
        return [*undo, functools.partial(self.tower.__dict__.pop, "forward_intermediates", None)]


def _no_intermediates(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "An accelerated open_clip tower has no feature maps between its layers; call model.mmaccel.remove() first."
    )


def _look(
    per_head: bool,
    merging: Callable[[], Merging | None],
    attention: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Forward pre-hook of an attention of open_clip, ``nn.MultiheadAttention`` or its own one."""
    merged = merging()
    if merged is None:
        return None
    x, heads = args[0], attention.num_heads
    normed = not isinstance(getattr(attention, "ln_k", nn.Identity()), nn.Identity)
    weights = attention.in_proj_weight.chunk(3)
    biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)

    def project(x: Tensor, i: int) -> Tensor:
        """Queries (0) or keys (1), ``[N, H, T, d]``."""
        weight, bias = weights[i].unflatten(0, (heads, -1)), biases[i]
        bias = None if bias is None else bias.unflatten(0, (heads, -1))
        if not per_head and not normed:
            # the mean over heads of a projection is the projection by the mean
            weight, bias = weight.mean(0, keepdim=True), None if bias is None else bias.mean(0, keepdim=True)
        projected = linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        projected = projected.unflatten(-1, (len(weight), -1)).transpose(1, 2)
        return (attention.ln_q, attention.ln_k)[i](projected) if normed else projected

    if merged.layer is None:
        # only the weights of the tokens are wanted
        query = key = x[:, None]
    else:
        key = project(x, 1)
        query = project(x[:, :1], 0) if per_head else key
    with without_autocast(x.device):
        mask = merged.attention(query, key, None, key.shape[-1] ** -0.5)
    if mask is None:
        return None
    if isinstance(attention, nn.MultiheadAttention):
        return args, {**kwargs, "key_padding_mask": mask[:, 0, 0]}
    return args, {**kwargs, "attn_mask": mask}


def encoder_of(model: Any) -> Encoder:
    """The adapter of an image encoder; unknown ones are refused."""
    kind, tower = getattr(getattr(model, "config", None), "model_type", None), getattr(model, "vision_model", model)
    if kind in TransformersEncoder.model_types and hasattr(tower, "encoder"):
        if hasattr(tower.embeddings, "patch_embedding"):
            return TransformersEncoder(model)
    tower = getattr(model, "visual", model)
    if hasattr(tower, "conv1") and hasattr(getattr(tower, "transformer", None), "resblocks"):
        return OpenClipEncoder(tower)
    if hasattr(tower, "trunk"):
        raise UnsupportedError(
            "Towers that open_clip takes from timm are not supported; load SigLIP with transformers."
        )
    if hasattr(model, "generate"):
        raise UnsupportedError(f"{type(model).__name__} generates; accelerate it with accelerate_vlm.")
    raise UnsupportedError(
        f"{type(model).__name__} is not a supported image encoder; supported are CLIP and SigLIP of transformers, and "
        "CLIP models of open_clip with a VisionTransformer."
    )
