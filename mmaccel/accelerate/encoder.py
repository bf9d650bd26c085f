"""Image encoders without a language model behind them: :func:`accelerate_encoder`, for retrieval and embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.functional import linear

from ..core.reduction import Reduction
from ..core.stats import Stats
from ..errors import MmaccelError, UnsupportedError
from ..families.tower import Towers
from ..method import EncoderMethod
from ..recipe import Recipe
from ..recipe import recipe as find_recipe
from ..runtime.attention import Plug
from ..runtime.encoder import EncoderMerging, Merged
from ..runtime.scope import Encoded, Scope, checked_kernels, current, pop, push
from ..runtime.taps import Taps

M = TypeVar("M", bound=nn.Module)


class Encoder(Towers):
    """One tower that stands alone; all its layers are read."""

    tower: Any

    def towers(self) -> list[Any]:
        """The tower."""
        return [self.tower]

    @property
    def feature_layer(self) -> int:
        """The last layer."""
        return len(self.tower_layers(self.tower)) - 1

    def tap_layer(self, layer: int | None) -> int:
        """As Python counts."""
        depth = self.feature_layer + 1
        return range(depth)[self.feature_layer if layer is None else layer]

    def attach(self, method: EncoderMethod) -> list[Callable[[], None]]:
        """Let the attention of every layer tell what merging must know; returns how to undo it."""
        raise NotImplementedError

    def check_attached(self) -> None:
        """Raise when what :meth:`attach` installed is no longer there."""


class TransformersEncoder(Encoder):
    """CLIP and SigLIP of transformers, whole or the vision half, with or without projection."""

    model_types = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")

    def __init__(self, model: Any) -> None:
        self.name = model.config.model_type
        self.tower = getattr(model, "vision_model", model)
        self.plug: Plug | None = None

    @property
    def has_cls(self) -> bool:
        """CLIP has one, SigLIP does not."""
        return self.name.startswith("clip")

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """The layers of ``encoder``."""
        return list(tower.encoder.layers)

    def attention_of(self, layer: Any) -> nn.Module:
        """Both name it self_attn."""
        found: nn.Module = layer.self_attn
        return found

    def attach(self, method: EncoderMethod) -> list[Callable[[], None]]:
        """By the tower's attention function."""
        self.plug = Plug(self.tower, "vision")
        return [self.plug.off]

    def check_attached(self) -> None:
        """Whether the attention function is ours."""
        if self.plug is not None:
            self.plug.check()


class OpenClipEncoder(Encoder):
    """The ``VisionTransformer`` of open_clip, in a CLIP model or by itself."""

    name = "open_clip"
    has_cls = True

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        if not tower.transformer.batch_first:
            raise UnsupportedError("The open_clip tower has batch_first=False; create the model without that option.")

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """open_clip names them resblocks."""
        return list(tower.transformer.resblocks)

    def attention_of(self, layer: Any) -> nn.Module:
        """open_clip names it attn."""
        found: nn.Module = layer.attn
        return found

    def attach(self, method: EncoderMethod) -> list[Callable[[], None]]:
        """By hooks before every attention, which keeps queries and keys to itself: they are projected once more, the keys
        to their mean over heads, unless the method needs them per head."""
        hook = functools.partial(_look, method.needs_cls)
        layers = self.tower_layers(self.tower)
        undo = [self.attention_of(x).register_forward_pre_hook(hook, with_kwargs=True).remove for x in layers]
        # it would pass by the hooks of the tower, and its maps need the full grid behind every layer
        self.tower.__dict__["forward_intermediates"] = _no_intermediates
        return [*undo, functools.partial(self.tower.__dict__.pop, "forward_intermediates", None)]


def _no_intermediates(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "An accelerated open_clip tower has no feature maps between its layers; call model.mmaccel.remove() first."
    )


def _look(per_head: bool, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before an attention of open_clip: ``nn.MultiheadAttention``, or its own one."""
    scope = current()
    merged = scope.encoding.merged if scope is not None and scope.encoding is not None else None
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
        made = linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        made = made.unflatten(-1, (len(weight), -1)).transpose(1, 2)
        return (attention.ln_q, attention.ln_k)[i](made) if normed else made

    if merged.layer is None:
        # only the weights of the tokens are wanted
        query = key = x[:, None]
    else:
        key = project(x, 1)
        query = project(x[:, :1], 0) if per_head else key
    mask = merged.attention(query, key, None, key.shape[-1] ** -0.5)
    if mask is None:
        return None
    if isinstance(attention, nn.MultiheadAttention):
        return args, {**kwargs, "key_padding_mask": mask[:, 0, 0]}
    return args, {**kwargs, "attn_mask": mask}


def encoder_of(model: Any) -> Encoder:
    """The adapter of an image encoder.

    Raises
    ------
    UnsupportedError
        If it is none that is known; the message says which are.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in TransformersEncoder.model_types and hasattr(getattr(model, "vision_model", model), "encoder"):
        if hasattr(getattr(model, "vision_model", model).embeddings, "patch_embedding"):
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
        f"{type(model).__name__} is no image encoder that mmaccel knows; it knows CLIP and SigLIP of transformers, and "
        "CLIP models of open_clip with a VisionTransformer."
    )


class EncoderAccelerator:
    """The handle ``model.mmaccel`` of an encoder: what was put on it, its statistics, and the way back.

    Everything hangs on this one instance: hooks on its modules, and the attention function of a transformers tower.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, kernels: str = "auto") -> None:
        built = recipe.build()
        method = built[0][1] if len(built) == 1 else None
        if not isinstance(method, EncoderMethod):
            raise MmaccelError(
                f"Recipe {recipe.name!r} is more than one method inside the encoder; use 'tome', 'pitome' or 'evit'."
            )
        self.recipe = recipe
        self.kernels = checked_kernels(kernels)
        self.encoder = encoder_of(model)
        method.check(self.encoder)
        self._last: Stats | None = None
        self._merged: Merged | None = None
        self._restore: list[Callable[[], None]] = []
        self.taps = Taps(self.encoder, [], self._hook)
        try:
            self.merging = EncoderMerging(self.encoder, method, built[0][0].retain, self._hook)
            self._restore += self.encoder.attach(method)
            tower = self.encoder.tower
            self._hook(tower.register_forward_pre_hook(self._open, prepend=True))
            self._hook(tower.register_forward_hook(self._close, always_call=True))
        except BaseException:
            self.remove()
            raise
        model.__dict__["mmaccel"] = self
        self._restore.append(functools.partial(model.__dict__.pop, "mmaccel", None))

    def stats(self) -> dict[str, Any]:
        """Figures of the last call: patches in, resolved by the budget and kept, summed over pictures, and seconds; empty
        before the first."""
        if self._last is None:
            return {}
        figures = vars(self._last.stages[0])
        return {"recipe": self.recipe.name, **figures, "seconds": self._last.clock.seconds()}

    @property
    def reduction(self) -> Reduction | None:
        """What became of the patches of the last pictures, ``[N, patches]``; None if all of them stayed."""
        return None if self._merged is None else self._merged.reduction()

    def remove(self) -> None:
        """Make the model exactly what it was."""
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()

    def __reduce__(self) -> Any:
        # a copied model would share this handle, which knows only the model it was made for
        raise UnsupportedError("An accelerated encoder cannot be copied or pickled; call model.mmaccel.remove() first.")

    def __repr__(self) -> str:
        return f"<mmaccel {self.recipe.name!r} on {self.encoder.name}>"

    def _hook(self, *handles: Any) -> None:
        self._restore.extend(handle.remove for handle in handles)

    def _open(self, module: nn.Module, args: Any) -> None:
        self.encoder.check_attached()
        if module.training:
            raise UnsupportedError("mmaccel accelerates inference; call model.eval() first.")
        if (stale := current(self)) is not None:  # type: ignore[arg-type]
            pop(stale)  # of a call that was interrupted from the keyboard
        # an owner of a scope is asked for its taps only, as long as no language model runs
        scope = Scope(self, Stats(self.recipe.name), encoding=Encoded({}))  # type: ignore[arg-type]
        scope.timer = scope.stats.clock.start(next(module.parameters()).device), "encoder"
        push(scope)

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        scope = current(self)  # type: ignore[arg-type]
        if scope is None or scope.timer is None or scope.encoding is None:
            return
        pop(scope)
        scope.stats.clock.stop(scope.timer[1], scope.timer[0])
        if scope.stats.stages:
            self._last, self._merged = scope.stats, scope.encoding.merged


def accelerate_encoder(
    model: M, recipe: str | Path | Mapping[str, Any] | Recipe = "pitome", *, kernels: str = "auto", **overrides: Any
) -> M:
    """Make an image encoder faster by merging tokens between its layers.

    Parameters
    ----------
    model : CLIP or SigLIP of transformers (``CLIPModel``, ``CLIPVisionModel``, ``CLIPVisionModelWithProjection``,
        ``SiglipModel``, ``SiglipVisionModel``), or a CLIP model or ``VisionTransformer`` of open_clip. Text towers stay as
        they are. A model that is accelerated already gets the new recipe instead.
    recipe : a method inside the encoder: ``"tome"``, ``"pitome"`` or ``"evit"``, or a recipe of one of them.
    kernels : ``"auto"`` runs Triton kernels on GPUs on which they build; ``"off"`` runs their plain definitions for this model,
        whatever the device.
    **overrides : ``retain=`` (a float is the share of patches left behind the last layer, an int their number per picture),
        or an option of the method.

    Returns
    -------
    The same model; features come out in the shapes they had, hidden states between the layers are short.
    ``model.mmaccel`` is its :class:`EncoderAccelerator`: ``stats()``, ``reduction``, ``remove()``.

    Raises
    ------
    MmaccelError
        If the recipe, a budget, an option or ``kernels`` is of no use.
    UnsupportedError
        If the model is no encoder that is known, or lacks what the method needs.
    """
    chosen = find_recipe(recipe).override(**overrides)
    previous = getattr(model, "mmaccel", None)
    if isinstance(previous, EncoderAccelerator):
        previous.remove()
    try:
        EncoderAccelerator(model, chosen, kernels)
    except BaseException:
        if isinstance(previous, EncoderAccelerator):
            EncoderAccelerator(model, previous.recipe, previous.kernels)
        raise
    return model


@contextmanager
def accelerated_encoder(
    model: M, recipe: str | Path | Mapping[str, Any] | Recipe = "pitome", *, kernels: str = "auto", **overrides: Any
) -> Iterator[M]:
    """:func:`accelerate_encoder` for the length of a ``with`` block; afterwards the model is what it was before."""
    previous = getattr(model, "mmaccel", None)
    accelerate_encoder(model, recipe, kernels=kernels, **overrides)
    try:
        yield model
    finally:
        if isinstance(handle := getattr(model, "mmaccel", None), EncoderAccelerator):
            handle.remove()
        if isinstance(previous, EncoderAccelerator):
            EncoderAccelerator(model, previous.recipe, previous.kernels)
