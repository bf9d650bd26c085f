"""VideoLLaMA 3: pictures of any size, clips at half of it; of a clip's later frames only what changed is in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.layout import Layout, Modality, Picture, Tile
from .base import Facts
from .grids import PackedGrids
from .tower import EncoderCall


class VideoLlama3(PackedGrids):
    """The processor says along how many patches of a side a picture is averaged: of pictures every patch makes a token, of
    clips every block of 2x2, which stand one behind the other. Frames are separate runs with time stamps between them, in
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
    layers_path = "encoder.layers"
    attention_name = "self_attn"

    def joined(self, encoded: EncoderCall) -> int:
        """Patches along one side of the block of a token; processors give one number a call."""
        sizes: Any = next(value for name, value in encoded.arguments.items() if name.endswith("merge_sizes"))
        return int(sizes[0])

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        return torch.arange(patches).view(-1, self.joined(encoded) ** 2)

    def grids(self, modality: Modality, encoded: EncoderCall) -> list[tuple[int, int, int]]:
        """(t, h, w) of every picture in tokens."""
        side = self.joined(encoded)
        return [(t, h // side, w // side) for t, h, w in self._given_grids(encoded)]

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        flat = torch.cat([v[0] for v in values])
        return flat.reshape(-1, self.joined(encoded) ** 2, *flat.shape[1:]).mean(1)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """Clips with the tokens that are in the prompt."""
        whole = super().pictures(modality, encoded, ids)
        there = encoded.arguments.get("video_compression_mask") if modality == "video" else None
        if there is None:
            return whole
        there = there.cpu()
        return [[_some(tile, there[tile.source]) for tile in frames] for frames in whole]

    def layout(self, ids: Tensor, valid: Tensor, encoded: Mapping[Modality, EncoderCall]) -> Layout:
        """The layout; tokens that are not in the prompt need no place there."""
        seen = encoded.get("video")
        if seen is not None and (there := seen.arguments.get("video_compression_mask")) is not None:
            encoded = {**encoded, "video": replace(seen, tokens=int(there.sum()))}
        return super().layout(ids, valid, encoded)


def _some(tile: Tile, there: Tensor) -> Tile:
    """The tokens of a frame that ``there [n]`` bool selects."""
    return Tile(tile.grid, tile.cells[there], tile.source[there])
