"""LLaVA-OneVision: one image tiled as LLaVA-NeXT, several images plain, clips bilinearly pooled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from .base import Facts, clip_frames, resampled
from .llava_next import LlavaNext, sizes
from .tower import EncoderCall


class LlavaOneVision(LlavaNext):
    """A row with one image has it tiled (at most ``anyres_max_k`` tiles' worth of tokens); in a row with several, each is
    ``n * n`` tokens and a newline. A clip ends in one newline."""

    name = "llava_onevision"
    model_types = ("llava_onevision",)
    place = 3
    facts = Facts("yes, tiled", cls=False)
    modalities = ("image", "video")

    @property
    def pooled(self) -> int:
        """Cells along one side of a pooled frame."""
        return -(-self.side // 2)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        n, m = self.side, self.pooled
        if modality == "video":
            clips, frames = clip_frames(encoded)
            return [[Tile.raster(frames, m, m, i * frames * m * m, newline=True)] for i in range(clips)]
        per_row: Any = encoded.arguments.get("batch_num_images")
        shapes = sizes(encoded)
        alone = [True] * len(shapes) if per_row is None else [int(k) == 1 for k in per_row for _ in range(int(k))]
        aspect = encoded.arguments.get("vision_aspect_ratio") or self.config.vision_aspect_ratio
        offset, pictures = 0, []
        for size, single in zip(shapes, alone, strict=True):
            if single:
                tiles, used = self.anyres(size, offset, int(aspect.removeprefix("anyres_max_")))
            else:
                tiles, used = [Tile.raster(1, n, n, offset, newline=True)], n * n
            pictures.append(tiles)
            offset += used
        return pictures

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        flat = torch.cat(values)
        if modality == "image":
            return flat.flatten(0, 1)
        return resampled(flat, self.side, self.pooled, "bilinear")
