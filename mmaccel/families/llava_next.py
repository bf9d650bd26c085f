"""LLaVA-NeXT: a base image and a grid of tiles, unpadded, with a newline token behind every row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from ..core.layout import Modality, Picture, Tile
from .base import Facts, Family, block_mean, clip_frames, consecutive, raster_blocks
from .tower import EncoderCall


class LlavaNext(Family):
    """Base image first, then the rows of the stitched tiles. Each tile is a segment; newlines belong to the last tile of
    their row and have no cell."""

    name = "llava_next"
    model_types = ("llava_next",)
    place = 2
    facts = Facts("yes, tiled", clips=False)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        offset, pictures = 0, []
        for size in sizes(encoded):
            tiles, used = self.anyres(size, offset, None)
            pictures.append(tiles)
            offset += used
        return pictures

    def anyres(self, size: tuple[int, int], offset: int, most: int | None) -> tuple[Picture, int]:
        """Segments of one tiled image and the number of sources it has.

        ``size`` is the original (height, width); ``most`` limits the tiles' tokens to ``most`` tiles' worth by bilinear
        resizing (LLaVA-OneVision). The prompt interleaves the tiles row by row, so all of them form one segment whose
        cells lie in the stitched grid.
        """
        n, step = self.cells, self.vision.image_size
        best = select_best_resolution(size, self.config.image_grid_pinpoints)
        gh, gw = best[0] // step, best[1] // step
        height, width = gh * n, gw * n
        if size[1] / size[0] > width / height:
            top, left = (height - int(round(size[0] * (width / size[1]), 7))) // 2, 0
        else:
            top, left = 0, (width - int(round(size[1] * (height / size[0]), 7))) // 2
        h, w = height - 2 * top, width - 2 * left
        rows, cols = torch.arange(h), torch.arange(w)
        ratio = math.sqrt(h * w / (most * n * n)) if most else 0.0
        if ratio > 1.1:
            # a resized cell has no single patch; it takes the nearest one
            new_h, new_w = int(h // ratio), int(w // ratio)
            rows = ((torch.arange(new_h) + 0.5) * h / new_h).long()
            cols = ((torch.arange(new_w) + 0.5) * w / new_w).long()
            h, w = new_h, new_w
        row, col = (x.flatten() for x in torch.meshgrid(rows + top, cols + left, indexing="ij"))
        part = (row // n) * gw + col // n
        source = offset + n * n + part * n * n + (row % n) * n + col % n
        cells = torch.cartesian_prod(torch.tensor([0]), torch.arange(h), torch.arange(w)).view(-1, 3)
        # newlines: one behind every row
        source = torch.cat([source.view(h, w), torch.full((h, 1), -1)], dim=1).flatten()
        cells = torch.cat([cells.view(h, w, 3), torch.full((h, 1, 3), -1)], dim=1).view(-1, 3)
        part = torch.cat([part.view(h, w), part.view(h, w)[:, -1:]], dim=1).flatten()
        tiles = [Tile.raster(1, n, n, offset), Tile((1, h, w), cells, source, part, gh * gw)]
        return tiles, (1 + gh * gw) * n * n


class LlavaNextVideo(LlavaNext):
    """As LLaVA-NeXT; clips have 2x2-pooled frames and no newlines."""

    name = "llava_next_video"
    model_types = ("llava_next_video",)
    place = 4
    facts = Facts("yes, tiled", merging="single, in clips 2x2 blocks")
    modalities = ("image", "video")

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        if modality == "image":
            return super().pictures(modality, encoded, ids)
        clips, frames = clip_frames(encoded)
        return consecutive([[(frames, self.side // 2, self.side // 2)]] * clips)

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """The blocks that pooling joins in clips; with an odd side pooling leaves patches out, and they merge singly."""
        if "image_sizes" in encoded.arguments or self.side % 2:
            return super().units(encoded, patches)
        return raster_blocks(self.side, 2)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        if modality == "image":
            return super().to_tokens(modality, encoded, values)
        return block_mean(torch.cat(values), self.side, 2).flatten(0, 1)


def sizes(encoded: EncoderCall) -> list[tuple[int, int]]:
    """The original (height, width) of every image of the call."""
    given: Any = encoded.arguments["image_sizes"]
    return [(int(h), int(w)) for h, w in (given.tolist() if isinstance(given, Tensor) else given)]
