"""One adapter a model family, and nothing of a family anywhere else."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UnsupportedError
from .base import Family
from .internvl import InternVL
from .llava import Llava
from .llava_next import LlavaNext, LlavaNextVideo
from .llava_onevision import LlavaOneVision
from .qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL
from .smolvlm import SmolVLM
from .video_llava import VideoLlava

FAMILIES: tuple[type[Family], ...] = (
    Llava,
    LlavaNext,
    LlavaOneVision,
    LlavaNextVideo,
    VideoLlava,
    Qwen2VL,
    Qwen25VL,
    Qwen3VL,
    InternVL,
    SmolVLM,
)


def family_of(model: nn.Module, processor: Any = None) -> Family:
    """The adapter of a model.

    Raises
    ------
    UnsupportedError
        If the model is of no supported family; the message lists those that are.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    for family in FAMILIES:
        if kind in family.model_types:
            if not hasattr(model, "generate") or not hasattr(model, "model"):
                raise UnsupportedError(
                    f"{type(model).__name__} cannot generate; give the ...ForConditionalGeneration model of {kind}."
                )
            return family(model, processor)
    known = ", ".join(f.name for f in FAMILIES)
    raise UnsupportedError(f"mmaccel does not know the model type {kind!r}; it supports {known}.")


__all__ = ["FAMILIES", "Family", "family_of"]
