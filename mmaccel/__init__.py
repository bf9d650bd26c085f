"""mmaccel: pretrained vision and video LLMs, faster and smaller at inference, without retraining."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.reduction import Reduction
from .errors import MmaccelError, UnsupportedError
from .media.prepare import prepare
from .method import Method
from .method.registry import method, methods, register
from .recipe import Recipe, Stage, recipe, recipes
from .version import __version__

if TYPE_CHECKING:
    from .accelerate import (
        Accelerator,
        EncoderAccelerator,
        accelerate_encoder,
        accelerate_vlm,
        accelerated,
        accelerated_encoder,
        is_accelerated,
    )
    from .programs.streaming import VideoSession
    from .programs.video_qa.qa import answer_videos

_LAZY = {
    **dict.fromkeys(("Accelerator", "accelerate_vlm", "accelerated", "is_accelerated"), "accelerate"),
    **dict.fromkeys(("EncoderAccelerator", "accelerate_encoder", "accelerated_encoder"), "accelerate"),
    "VideoSession": "programs.streaming",
    "answer_videos": "programs.video_qa.qa",
}
__all__ = [
    "Accelerator",
    "EncoderAccelerator",
    "Method",
    "MmaccelError",
    "Recipe",
    "Reduction",
    "Stage",
    "UnsupportedError",
    "VideoSession",
    "__version__",
    "accelerate_encoder",
    "accelerate_vlm",
    "accelerated",
    "accelerated_encoder",
    "answer_videos",
    "is_accelerated",
    "method",
    "methods",
    "prepare",
    "recipe",
    "recipes",
    "register",
]


def __getattr__(name: str) -> Any:
    # transformers is slow to import, and what only lists methods can do without
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
