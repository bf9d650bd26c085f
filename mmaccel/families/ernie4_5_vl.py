"""ERNIE 4.5 VL: dynamic resolution, pairs of frames joined behind the tower, M-RoPE; experts of their own for visual tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, consecutive
from .qwen_vl import Qwen2VL
from .tower import EncoderCall


class Ernie45VLMoe(Qwen2VL):
    """Pictures as in Qwen2-VL. Two frames of a clip make one step of its grid, joined behind the tower, which encodes each by
    itself. Token types say which experts a token goes to; marks around a picture go to those of pictures. RoPE turns
    neighbours."""

    name = "ernie4_5_vl_moe"
    model_types = ("ernie4_5_vl_moe",)
    place = 9
    tower_names = {"image": "vision_tower", "video": "vision_tower"}
    facts = Facts("yes, any size", cls=False, merging="-")
    whole = "encodes frames that are joined two by two behind it"
    halves = False
    by_token = ("moe_mm_token_type_ids",)

    @property
    def joined_frames(self) -> int:
        """Frames of a clip that make one step of its grid."""
        return int(self.vision.temporal_merge_size)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        joined = self.joined_frames if modality == "video" else 1
        return consecutive([[(t // joined, h, w)] for t, h, w in self.grids(modality, encoded)], clips=True)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """Mean of each merged block, of clips over the frames that are joined."""
        merged = super().to_tokens(modality, encoded, values)
        if modality == "image":
            return merged
        clips = merged.split([t * h * w for t, h, w in self.grids(modality, encoded)])
        sizes = (h * w for _, h, w in self.grids(modality, encoded))
        steps = [
            clip.unflatten(0, (-1, self.joined_frames, size)).mean(1) for clip, size in zip(clips, sizes, strict=True)
        ]
        return torch.cat([step.flatten(0, 1) for step in steps])
