"""MiniCPM-V and MiniCPM-OCR: a thumbnail and slices of any size; a tower that joins windows between its layers; Qwen3.5 behind
it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts
from .internvl import TiledByText
from .mrope import ThreeAxes
from .stateful import Stateful
from .tower import EncoderCall

#: the text in front of a slice of the picture or frame before it, and of the next frame of a clip
_SLICE = re.compile(r"(</image>|</slice>\n?)<slice>")
_FRAME = re.compile(r"</(image|slice)><image>")


class MiniCpmV(Stateful, TiledByText):
    """With a processor, a thumbnail and its slices are one picture, and frames that stand one behind the other are one clip;
    without it each of them is a clip. Positions of 4.6 are plain.
    """

    name = "minicpmv4_6"
    model_types = ("minicpmv4_6",)
    place = 12
    facts = Facts("yes, tiled, any size", cls=False, merging="-")
    # the tower of releases before it takes one size of tiles
    since = "5.20"
    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")
    carrying = ("linear_attention",)
    closed = "joins windows of patches between its layers"
    halves = False
    layers_path = ""
    joins_along = 1

    def side_of(self, encoded: EncoderCall) -> int:
        """Patches along one side of the block that becomes one token."""
        return self.side_in(encoded.arguments.get("downsample_mode") or self.config.downsample_mode)

    def side_in(self, mode: str) -> int:
        """The same in a downsample mode, ``"16x"`` or ``"4x"``, which leaves the tower's windows out."""
        side: int = self.config.merge_kernel_size[0] ** self.config.merger_times
        return side if mode == "4x" else side * self.vision.window_kernel_size[0]

    def tower_sizes(self, given: Mapping[str, Any]) -> list[int]:
        """Patches of every slice."""
        return [h * w for h, w in given["target_sizes"].tolist()]

    def tower_part(self, given: Mapping[str, Any], sizes: Sequence[int], begin: int, end: int) -> dict[str, Any]:
        """Slices are packed in rows of pixels ``[1, colours, patch, patches * patch]``."""
        patch, first, count = self.vision.patch_size, sum(sizes[:begin]), sum(sizes[begin:end])
        pixels = given["pixel_values"][..., first * patch : (first + count) * patch]
        return {**given, "pixel_values": pixels, "target_sizes": given["target_sizes"][begin:end]}

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:

        def joins(between: str) -> Literal["tile", "frame"] | None:
            if _SLICE.fullmatch(between):
                return "tile"
            return "frame" if modality == "video" and _FRAME.fullmatch(between) else None

        given = encoded.arguments["target_sizes" if modality == "image" else "target_sizes_videos"]
        sizes = torch.as_tensor(given) // self.side_of(encoded)
        runs = self.runs(ids, encoded.tokens, torch.eq(ids, self.token_id(modality) or 0))
        return self.sized(ids, runs, sizes.tolist(), joins)


class MiniCpmV47(MiniCpmV, ThreeAxes):
    """A thumbnail and its slices share one canvas: where they show the same, they have the same positions."""

    name = "minicpmv4_7"
    model_types = ("minicpmv4_7",)
    since = "5.23"
    sized_by = ("target_sizes", "target_sizes_videos")


class MiniCpmOcr(MiniCpmV):
    """MiniCPM-V 4.6 for pages, of which it keeps four times as many tokens."""

    name = "minicpm_ocr"
    model_types = ("minicpm_ocr",)
    since = "5.23"
    reads_pages = True
