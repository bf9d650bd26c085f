"""Step 3.7: tiles of a picture and all of it, two convolutions behind the tower; layers with windows have other heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, Family, consecutive
from .tower import CLIP_STD, EncoderCall


class Step37(Family):
    """Tiles row by row, all of the picture last. Marks around tiles are text."""

    name = "step3p7"
    model_types = ("step3p7",)
    since = "5.24"
    facts = Facts("yes, tiled", clips=False, cls=False, merging="-")
    closed = "reads tiles and pictures of different sizes, in a call for each"
    tower_names = {"image": "vision_model"}
    usual_std = CLIP_STD
    layers_path = ""
    halves = False
    no_return = "has layers of two RoPEs"

    def cells_of(self, views: Tensor) -> int:
        """Tokens along one side of each view ``[views, 3, H, W]``, which two convolutions halve."""
        return math.ceil(views.shape[-1] // self.vision.patch_size / 4)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        whole, tiles = encoded.arguments["pixel_values"], encoded.arguments.get("pixel_values_local")
        given = encoded.arguments.get("num_local_patches")
        counts = [0] * len(whole) if tiles is None or given is None else torch.as_tensor(given).tolist()
        of_tile = 0 if tiles is None else self.cells_of(tiles)
        size, part = (1, self.cells_of(whole), self.cells_of(whole)), (1, of_tile, of_tile)
        return consecutive([[*[part] * count, size] for count in counts])

    @property
    def query_heads(self) -> None:
        """Layers with windows have more query heads than the others."""
        return None

    def rope_kind(self, layer: int) -> str:
        """Layers with windows turn all of a head, by other angles."""
        return str(self.text.config.layer_types[layer])

    def heads_in(self, layer: int) -> tuple[int, int]:
        """Number of KV heads of a layer, and their width."""
        attention = self.attention_in(layer)
        return attention.num_heads // attention.num_key_value_groups, attention.head_dim
