"""mmaccel: pretrained vision and video LLMs, faster and smaller at inference, without retraining."""

from typing import TYPE_CHECKING, Any

from .errors import MmaccelError, UnsupportedError
from .method import Method
from .prepare import prepare
from .recipe import Recipe, Stage, recipe, recipes
from .reduction import Reduction
from .registry import method, methods, register

if TYPE_CHECKING:
    from .accelerate import Accelerator, accelerate_vlm, accelerated, is_accelerated
    from .encoders.alone import EncoderAccelerator, accelerate_encoder, accelerated_encoder
    from .video.qa import answer_videos
    from .video.streaming import VideoSession

__version__ = "0.1.0"
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
    if name in ("Accelerator", "accelerate_vlm", "accelerated", "is_accelerated"):
        from . import accelerate

        return getattr(accelerate, name)
    if name in ("EncoderAccelerator", "accelerate_encoder", "accelerated_encoder"):
        from .encoders import alone

        return getattr(alone, name)
    if name == "VideoSession":
        from .video.streaming import VideoSession

        return VideoSession
    if name == "answer_videos":
        from .video.qa import answer_videos

        return answer_videos
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
