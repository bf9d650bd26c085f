"""Video-LLaVA: an image tower and a video tower; every frame keeps its CLS token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from .base import Family, clip_frames
from .llava import with_cls
from .tower import EncoderCall


class VideoLlava(Family):
    """``n * n`` tokens an image; ``frames * (n * n + 1)`` a clip, the CLS token of each frame first and without a cell."""

    name = "video_llava"
    model_types = ("video_llava",)
    place = 5
    modalities = ("image", "video")
    tower_names = {"image": "image_tower", "video": "video_tower"}

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        n = self.side
        if modality == "image":
            return [[Tile.raster(1, n, n, i * n * n)] for i in range(encoded.tokens // (n * n))]
        clips, frames = clip_frames(encoded)
        pictures: list[Picture] = []
        for i in range(clips):
            parts = [with_cls(Tile.raster(1, n, n, (i * frames + f) * n * n, frame=f), 1) for f in range(frames)]
            pictures.append(
                [
                    Tile(
                        (frames, n, n),
                        torch.cat([p.cells for p in parts]),
                        torch.cat([p.source for p in parts]),
                    )
                ]
            )
        return pictures
