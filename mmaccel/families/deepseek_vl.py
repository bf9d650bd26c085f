"""DeepSeek-VL: one square picture, a SigLIP tower whose last output is read, every patch a token."""

from __future__ import annotations

from typing import ClassVar

from .base import Facts, Family
from .tower import CLIP_STD


class DeepseekVL(Family):
    """``n * n`` tokens a picture, in raster order."""

    name = "deepseek_vl"
    model_types = ("deepseek_vl",)
    facts = Facts(clips=False, cls=False)
    tower_names = {"image": "vision_model"}
    usual_std: ClassVar[tuple[float, ...]] = CLIP_STD
