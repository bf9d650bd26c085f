"""Accelerate stand-alone image encoders, for retrieval and embeddings."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn

from ..core.figures import EncoderStats
from ..core.reduction import Reduction
from ..core.stats import Stats
from ..errors import UnsupportedError
from ..families.alone import encoder_of
from ..recipe import Recipe, RecipeLike, get_recipe
from ..runtime.build import plan_encoder
from ..runtime.call.call import Call, VisionState, current, pop, push
from ..runtime.call.hooks import in_training
from ..runtime.call.plan import EncoderPlan, Kernels
from ..runtime.call.vision_output import VisionOutput
from ..runtime.tower.attention import VISION
from ..runtime.tower.encoder_merging import EncoderMerging, merged_of
from ..runtime.tower.merged import Merged
from ..runtime.tower.taps import Taps
from .handle import Handle, check_model, exchange, restored

M = TypeVar("M", bound=nn.Module)


class EncoderAccelerator(Handle):
    """The handle ``model.mmaccel`` of an accelerated encoder: statistics, last reduction, removal.

    Examples
    --------
    >>> handle = accelerate_encoder(clip, "tome", retain=9).mmaccel
    >>> features = clip(pixel_values).pooler_output
    >>> int(handle.reduction.kept.sum())
    9
    >>> handle.remove()
    """

    what = "encoder"
    plan: EncoderPlan

    def __init__(self, model: nn.Module, recipe: Recipe, kernels: Kernels = "auto") -> None:
        super().__init__(model)
        self.encoder = encoder_of(model)
        self.plan = plan_encoder(recipe, self.encoder, kernels)
        self._last: Stats | None = None
        self._merged: Merged | None = None
        self.taps = Taps(self.encoder, [])
        self._install()

    def stats(self) -> EncoderStats:
        """Figures of the last call: patches in, resolved by the budget and kept, summed over pictures, and seconds; empty
        before the first."""
        if self._last is None:
            return EncoderStats()
        figures = vars(self._last.stages[0])
        return EncoderStats(recipe=self.recipe.name, **figures, seconds=self._last.clock.seconds())

    @property
    def reduction(self) -> Reduction | None:
        """The reduction of the last pictures' patches, ``[N, patches]``; None if all stayed."""
        return None if self._merged is None else self._merged.reduction()

    def again(self) -> EncoderAccelerator:
        """Accelerate the encoder again in the same way, after :meth:`remove`."""
        return EncoderAccelerator(self._model, self.recipe, self.plan.kernels)

    def _attach(self) -> None:
        stage, tower = self.plan.encoder, self.encoder.tower
        self.merging = EncoderMerging(self.plan, stage, self._hook, language=False)
        if self.encoder.attention_by_name:
            self._patch_attention(tower, VISION)
        self._restore += self.encoder.attach(stage.method.needs_cls, self._running)
        self._hook(tower.register_forward_pre_hook(self._open, prepend=True))
        self._hook(tower.register_forward_hook(self._close, always_call=True))

    def _running(self) -> Merged | None:
        call = current(self.plan)
        return merged_of(call.vision.running) if call is not None else None

    def _open(self, module: nn.Module, args: Any) -> None:
        self.check_attached()
        if module.training:
            raise UnsupportedError(in_training(self._model))
        if (stale := current(self.plan)) is not None:
            pop(stale)  # of a call that was interrupted from the keyboard
        call = Call(self.plan, Stats(self.recipe.name), VisionState(self.taps, running=VisionOutput({})))
        call.text.timer = call.stats.clock.start(next(module.parameters()).device), "encoder"
        push(call)

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        call = current(self.plan)
        if call is None or call.text.timer is None or call.vision.running is None:
            return
        pop(call)
        call.stats.clock.stop(call.text.timer[1], call.text.timer[0])
        if call.stats.stages:
            self._last, self._merged = call.stats, merged_of(call.vision.running)


def accelerate_encoder(
    model: M,
    recipe: RecipeLike = "pitome",
    *,
    retain: float | None = None,
    kernels: Kernels = "auto",
    **options: Any,
) -> M:
    """Make an image encoder faster by merging tokens between its layers.

    Parameters
    ----------
    model : CLIP or SigLIP of transformers (``CLIPModel``, ``CLIPVisionModel``, ``CLIPVisionModelWithProjection``,
        ``SiglipModel``, ``SiglipVisionModel``), or a CLIP model or ``VisionTransformer`` of open_clip. Text towers stay as
        they are. A model that is accelerated already gets the new recipe instead.
    recipe : a method inside the encoder: ``"tome"``, ``"pitome"`` or ``"evit"``, one with its options such as
        ``PiToMe(margin=0.5)``, or a recipe of one of them.
    retain : a float is the share of patches left behind the last layer, an int their number per picture; by default as the
        recipe says.
    kernels : ``"auto"`` runs Triton kernels on GPUs on which they build; ``"off"`` runs their plain definitions for this model,
        whatever the device.
    **options : options of the method.

    Returns
    -------
    The same model; features come out in the shapes they had, hidden states between the layers are short.
    ``model.mmaccel`` is its :class:`EncoderAccelerator`: ``stats()``, ``reduction``, ``remove()``.

    Raises
    ------
    MmaccelError
        If it is not a model, or the recipe, a budget, an option or ``kernels`` is not valid.
    UnsupportedError
        If the encoder is not supported, or lacks what the method needs.

    Examples
    --------
    >>> clip = accelerate_encoder(clip, "tome", retain=0.5)
    >>> features = clip(pixel_values).pooler_output
    >>> clip.mmaccel.stats()
    36 -> 18 patches (50 %), encoder ... ms
    >>> clip.mmaccel.remove()
    """
    check_model(model)
    chosen = get_recipe(recipe, retain=retain, **options)
    exchange(EncoderAccelerator.on(model), lambda: EncoderAccelerator(model, chosen, kernels))
    return model


def accelerated_encoder(
    model: M,
    recipe: RecipeLike = "pitome",
    *,
    retain: float | None = None,
    kernels: Kernels = "auto",
    **options: Any,
) -> AbstractContextManager[M]:
    """:func:`accelerate_encoder` for the length of a ``with`` block; afterwards the model is what it was before.

    Examples
    --------
    >>> with accelerated_encoder(clip, "pitome", retain=0.25):
    ...     features = clip(pixel_values).pooler_output
    >>> hasattr(clip, "mmaccel")
    False
    """
    given: dict[str, Any] = {"retain": retain, "kernels": kernels, **options}
    return restored(lambda: accelerate_encoder(model, recipe, **given), lambda: EncoderAccelerator.on(model))
