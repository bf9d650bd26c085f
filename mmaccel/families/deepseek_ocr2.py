"""DeepSeek-OCR 2: tiles of a page and its global view, each read into queries by an encoder like a language model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from .base import Facts, Family
from .tower import EncoderCall


class DeepseekOcr2(Family):
    """Adapter of DeepSeek-OCR 2. A query attends to all patches of its view and to earlier queries, so its place is one
    in a reading order and a view is a grid of one row. A separator follows the global view, which comes last."""

    name = "deepseek_ocr2"
    model_types = ("deepseek_ocr2",)
    place = 19
    facts = Facts("yes, tiled", clips=False, cls=False, merging="-")
    closed = "reads a picture into queries, which are no places of it"
    reads_pages = True
    layers_path = ""

    def queries(self, views: Tensor | None) -> int:
        """Tokens of each view ``[views, 3, H, W]``: as many as it has patches, whose sides two convolutions halve."""
        if views is None:
            return 0
        patches = views.shape[-1] // self.vision.sam_config.patch_size
        return math.ceil(patches / 4) ** 2

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        whole, tiles = encoded.arguments["pixel_values"], encoded.arguments.get("pixel_values_local")
        a_tile, all_of_it = self.queries(tiles), self.queries(whole)
        counts = [0] * len(whole) if tiles is None else torch.as_tensor(encoded.arguments["num_local_patches"]).tolist()
        pictures: list[Picture] = []
        offset = 0
        for count in counts:
            end = offset + count * a_tile
            views = [Tile.raster(1, 1, a_tile, at) for at in range(offset, end, a_tile or 1)]
            pictures.append([*views, Tile.raster(1, 1, all_of_it, end, newline=True)])
            offset = end + all_of_it
        return pictures
