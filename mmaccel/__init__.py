"""mmaccel: pretrained vision and video LLMs, faster and smaller at inference, without retraining."""

from .accelerate import Accelerator, accelerate_vlm, accelerated, is_accelerated
from .errors import MmaccelError, UnsupportedError
from .method import Method
from .recipe import Recipe, Stage, recipe, recipes
from .reduction import Reduction
from .registry import method, methods, register

__version__ = "0.1.0"
__all__ = [
    "Accelerator",
    "Method",
    "MmaccelError",
    "Recipe",
    "Reduction",
    "Stage",
    "UnsupportedError",
    "accelerate_vlm",
    "accelerated",
    "is_accelerated",
    "method",
    "methods",
    "recipe",
    "recipes",
    "register",
]
