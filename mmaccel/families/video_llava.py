"""Video-LLaVA: an image tower and a video tower; every frame keeps its CLS token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from .base import Family, clip_frames, consecutive
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
        if modality == "image":
            return super().pictures(modality, encoded, ids)
        n, (clips, frames) = self.side, clip_frames(encoded)
        pictures: list[Picture] = []
        for tiles in consecutive([[(1, n, n)] * frames] * clips, clips=True):
            parts = [with_cls(tile, 1) for tile in tiles]
            cells, source = torch.cat([part.cells for part in parts]), torch.cat([part.source for part in parts])
            pictures.append([Tile((frames, n, n), cells, source)])
        return pictures
