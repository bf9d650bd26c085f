"""Apertus 1.5: a tokenizer turns pictures into codes, which are words of the language model."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, Family, consecutive
from .tower import EncoderCall


class Apertus15(Family):
    """One token for each code, in raster order; marks behind rows are text. Patches with one code have one embedding, so visual
    tokens may be equal."""

    name = "apertus1p5"
    model_types = ("apertus1p5",)
    since = "5.24"
    facts = Facts("yes, any size", clips=False, cls=False, merging="-")
    closed = "is a tokenizer, whose codes are all that is left of a picture"
    tower_names = {"image": "vision_tokenizer"}
    layers_path = ""
    heads_first = True

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        sizes = torch.as_tensor(encoded.arguments["image_sizes"]) // self.vision.spatial_scale_factor
        return consecutive([[(1, h, w)] for h, w in sizes.tolist()])
