"""Aya Vision and Cohere2 Vision: tiles between marks, pixel shuffle; language models with windows and layers without RoPE."""

from __future__ import annotations

from torch import Tensor

from ..core.layout import Modality, Picture
from .base import WINDOWS, Facts
from .internvl import TiledByText
from .tower import EncoderCall

#: the tokens around all tiles of a picture
_ENDS = ("<|START_OF_IMG|>", "<|END_OF_IMG|>")


class AyaVision(TiledByText):
    """Adapter of Aya Vision: ``L`` tokens a tile, the whole picture last. With a processor, tiles between two marks are
    one picture; without it every tile is a picture."""

    name = "aya_vision"
    model_types = ("aya_vision",)
    place = 13
    facts = Facts("yes, tiled", clips=False, cls=False, merging="blocks of pixel shuffle")
    halves = False
    undivided = WINDOWS

    @property
    def shuffle(self) -> int:
        return int(self.config.downsample_factor)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        def begins(row: int, last: int, start: int) -> bool:
            between = self.text_before(ids, row, start, start - last)
            # without a processor there is no text
            return not between or any(mark in between for mark in _ENDS)

        return self.by_run(ids, encoded, begins)


class Cohere2Vision(AyaVision):
    """As Aya Vision; every tile ends in a line break token."""

    name = "cohere2_vision"
    model_types = ("cohere2_vision",)
    place = 14
