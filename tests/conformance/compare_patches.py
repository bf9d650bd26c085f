"""Patches that do not enter the tower, against the authors' programs; see comparators.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparators import Arrays, Params
from harness import make

from mmaccel.families.base import Description
from mmaccel.families.qwen_vl import Qwen3VL
from mmaccel.families.tower import EncoderCall


def pixelprune(params: Params, arrays: Arrays) -> None:
    """Pictures through the adapter of the family that the program is for, which cuts them into blocks."""
    method = make("pixelprune", scan=params["method"], metric=params["metric"], threshold=params["threshold"])
    first = 0
    for number, grid in enumerate(arrays["image_grid_thw"]):
        pixels = arrays["pixel_values"][first : first + int(grid.prod())]
        first += len(pixels)
        # the vector has colours as they are, which the adapter takes for divided ones
        [(values, places)] = FAMILY.unit_pixels(EncoderCall({"image_grid_thw": grid[None]}), 2 * pixels)
        source = method.predict(values)
        kept = source == torch.arange(source.shape[1])
        assert torch.equal(kept.flatten().nonzero()[:, 0], arrays[f"kept{number}"])
        assert torch.equal(places[kept].flatten(), arrays[f"patches{number}"])


class _Config:
    """What the adapter asks of Qwen3-VL's configuration."""

    spatial_merge_size, deepstack_visual_indexes, model_type = 2, (), "qwen3_vl"

    def __init__(self) -> None:
        self.vision_config = self.text_config = self


FAMILY = Qwen3VL(Description(_Config()))
COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    (
        "OPPO-Mente-Lab/PixelPrune",
        "pixelprune/core.py:compute_merged_keep_indices, merged_indices_to_patch_indices",
    ): pixelprune,
}
