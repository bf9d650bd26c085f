"""Wrappers that accelerate models and stand-alone image encoders."""

from .encoder import EncoderAccelerator, accelerate_encoder, accelerated_encoder
from .fallback import Fallback
from .vlm import Accelerator, accelerate_vlm, accelerated, handle, is_accelerated

__all__ = [
    "Accelerator",
    "EncoderAccelerator",
    "Fallback",
    "accelerate_encoder",
    "accelerate_vlm",
    "accelerated",
    "accelerated_encoder",
    "handle",
    "is_accelerated",
]
