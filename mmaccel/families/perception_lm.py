"""Perception-LM: a thumbnail and tiles, or frames, pooled behind the projector; a tower of timm."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from .base import Facts, Family
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
    has_cls = False
    layers_path = "timm_model.blocks"

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        pixels: Any = encoded.arguments["pixel_values"]
        count, tiles = pixels.shape[:2]
        tokens = encoded.tokens // (count * tiles)
        m = math.isqrt(tokens)
        if modality == "video":
            return [[Tile.raster(tiles, m, m, i * tiles * tokens)] for i in range(count)]
        return [
            [Tile.raster(1, m, m, at) for at in range(i * tiles * tokens, (i + 1) * tiles * tokens, tokens)]
            for i in range(count)
        ]
