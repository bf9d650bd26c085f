"""LFM3-VL: pictures and clips of any size; convolutions between the layers of the tower and of the language model."""

from __future__ import annotations

from .base import Facts
from .grids import PackedGrids
from .lfm2_vl import ShortConvolutions


class Lfm3VL(ShortConvolutions, PackedGrids):
    """A convolution of the language model sees the six tokens before its own. Every other layer with attention has a window,
    and turns by other angles. Positions are plain.
    """

    name = "lfm3_vl"
    model_types = ("lfm3_vl",)
    place = 12
    facts = Facts("yes, any size", cls=False, merging="-")
    since = "5.23"
    tower_names = {"image": "vision_tower", "video": "vision_tower"}
    closed = "has convolutions between its layers"
    usual_std = (0.5, 0.5, 0.5)
    stamped = True
    halves = False
    layers_path = ""

    def rope_kind(self, layer: int) -> str | None:
        """Layers with and without a window have RoPEs of different angles; convolutions have none."""
        kind = self.config.text_config.layer_types[layer]
        return None if kind in self.carrying else str(kind)
