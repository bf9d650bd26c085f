"""VideoLLaMA 3: pictures of any size, clips at half of it; of later frames only the tokens that changed are in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ..core.layout import Layout, Modality, Picture, Tile
from .base import Facts
from .grids import PackedGrids
from .tower import EncoderCall


class VideoLlama3(PackedGrids):
    """The processor says along how many patches of a side a picture is averaged: of pictures every patch makes a token, of
    clips every block of 2x2, whose patches are consecutive. Frames are separate runs with time stamps between them, in
    plain positions, and its ``video_compression_mask`` says which of their tokens are there.
    """

    name = "video_llama_3"
    model_types = ("video_llama_3",)
    place = 21
    facts = Facts("yes, any size", cls=False, merging="single, in clips 2x2 blocks")
    tower_names = {"image": "vision_model", "video": "vision_model"}
    stamped = True
    usual_std = (0.5, 0.5, 0.5)
    extra_inputs: ClassVar[tuple[str, ...]] = ("video_compression_mask",)

    def merged(self, encoded: EncoderCall) -> int:
        """Patches along one side of the block of a token; processors give one number a call."""
        sizes: Any = next(value for name, value in encoded.arguments.items() if name.endswith("merge_sizes"))
        return int(sizes[0])

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """Clips with the tokens that are in the prompt."""
        whole = super().pictures(modality, encoded, ids)
        mask = encoded.arguments.get("video_compression_mask") if modality == "video" else None
        if mask is None:
            return whole
        mask = mask.cpu()
        return [[Tile(t.grid, t.cells[mask[t.source]], t.source[mask[t.source]]) for t in clip] for clip in whole]

    def layout(self, ids: Tensor, valid: Tensor, encoded: Mapping[Modality, EncoderCall]) -> Layout:
        """The layout; tokens that are not in the prompt need no place there."""
        clips = encoded.get("video")
        if clips is not None and (mask := clips.arguments.get("video_compression_mask")) is not None:
            encoded = {**encoded, "video": replace(clips, tokens=int(mask.sum()))}
        return super().layout(ids, valid, encoded)
