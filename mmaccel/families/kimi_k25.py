"""Kimi K2.5: pictures of any size; frames of a clip averaged in chunks; a language model whose cache holds latents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, consecutive
from .grids import PackedGrids
from .internvl import TiledByText
from .tower import EncoderCall

#: the time stamp in front of a chunk, which sorts as text
_TIME = re.compile(r"\d\d:\d\d:\d\d\.\d{3}")


class KimiK25(PackedGrids, TiledByText):
    """One token for each block of 2x2 patches, in raster order. A clip is chunks of a few frames, with time stamps between;
    frames of a chunk attend to each other, and a token is their mean. With a processor, chunks whose
    time stamps rise are one clip; without it every chunk is one."""

    name = "kimi_k25"
    model_types = ("kimi_k25",)
    since = "5.24"
    facts = Facts("yes, any size", cls=False, merging="-")
    closed = "averages the frames of a clip"
    tower_names = {"image": "vision_tower", "video": "vision_tower"}
    usual_std = (0.5, 0.5, 0.5)
    layers_path = ""
    needs_processor = False
    halves = False
    latent = True

    @property
    def merge(self) -> int:
        """Patches along one side of a merged block."""
        return int(self.vision.merge_kernel_size[0])

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        grids = [(1, h, w) for _, h, w in self.grids(modality, encoded)]
        if modality == "image":
            return consecutive([[grid] for grid in grids])
        clips = list[list[tuple[int, int, int]]]()
        runs = self.runs(ids, encoded.tokens, torch.eq(ids, self.token_id("video") or 0))
        last = -1, ""
        for grid, (row, start, _) in zip(grids, runs, strict=True):
            # without a processor there is no text
            found = row, (_TIME.findall(self.text_before(ids, row, start, 40)) or [""])[-1]
            if row != last[0] or found <= last:
                clips.append([])
            clips[-1].append(grid)
            last = found
        return consecutive(clips, clips=True)

    def tower_sizes(self, given: Mapping[str, Any]) -> list[int]:
        """Patches of every picture or chunk."""
        return [t * h * w for t, h, w in given["grid_thw"].tolist()]

    def tower_part(self, given: Mapping[str, Any], sizes: Sequence[int], begin: int, end: int) -> dict[str, Any]:
        """Chunks are not divided: their frames see each other."""
        first, last = sum(sizes[:begin]), sum(sizes[:end])
        return {**given, "pixel_values": given["pixel_values"][first:last], "grid_thw": given["grid_thw"][begin:end]}
