"""Perception-LM: a thumbnail and tiles, or frames, pooled behind the projector; a tower of timm."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, Family, consecutive
from .tower import EncoderCall


class PerceptionLM(Family):
    """``L`` tokens a tile or frame; one run of placeholders a picture or clip."""

    name = "perception_lm"
    model_types = ("perception_lm",)
    place = 16
    facts = Facts("yes, tiled", cls=False, merging="-")
    modalities = ("image", "video")
    closed = "is one of timm, which computes its attention by itself"
    package = "timm"
    layers_path = "timm_model.blocks"

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        pixels: Any = encoded.arguments["pixel_values"]
        count, tiles = pixels.shape[:2]
        m = math.isqrt(encoded.tokens // (count * tiles))
        return consecutive([[(tiles, m, m)] if modality == "video" else [(1, m, m)] * tiles] * count)
