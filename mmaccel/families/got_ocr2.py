"""GOT-OCR2: one page, or tiles of one, each read by a tower like that of SAM."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ..core.layout import Modality, Picture, Tile
from .base import Facts
from .internvl import TiledByText
from .tower import EncoderCall


class GotOcr2(TiledByText):
    """A run of ``tiles * L`` tokens is a picture."""

    name = "got_ocr2"
    model_types = ("got_ocr2",)
    place = 15
    facts = Facts("yes, tiled", clips=False, cls=False, merging="-")
    closed = "works in windows with relative positions, and computes its attention by itself"
    has_cls = False
    needs_processor = False
    reads_pages = True

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """None that attend over a sequence of patches."""
        return []

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """One segment a tile."""
        # two convolutions halve the sides
        m = math.ceil(math.ceil(self.side / 2) / 2)
        pictures: list[Picture] = []
        offset = 0
        for _, start, stop in self.runs(ids, encoded.tokens):
            pictures.append([Tile.raster(1, m, m, at) for at in range(offset, offset + stop - start, m * m)])
            offset += stop - start
        return pictures
