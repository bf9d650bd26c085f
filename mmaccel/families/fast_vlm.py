"""FastVLM: one image, a convolutional tower (FastViT of timm) that leaves few tokens."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, Family, consecutive
from .tower import EncoderCall


class FastVLM(Family):
    """Adapter of FastVLM: every place of the last feature map is a token, in raster order."""

    name = "fast_vlm"
    model_types = ("fast_vlm",)
    place = 12
    facts = Facts(clips=False, cls=False, merging="-")
    closed = "is convolutional for the most part, without layers over patches"
    package = "timm"
    layers_path = ""

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """One tile an image, whose map has the shape of its pixels."""
        pixels: Any = encoded.arguments["pixel_values"]
        count, (height, width) = len(pixels), pixels.shape[-2:]
        tokens = encoded.tokens // count
        h = round(math.sqrt(tokens * height / width))
        return consecutive([[(1, h, tokens // h)]] * count)
