"""GOT-OCR2: one page, or tiles of one, each read by a tower like that of SAM."""

from __future__ import annotations

import math

from torch import Tensor

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
    layers_path = ""

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        # two convolutions halve the sides
        m = math.ceil(math.ceil(self.side / 2) / 2)
        pictures: list[Picture] = []
        offset = 0
        for _, start, stop in self.runs(ids, encoded.tokens):
            pictures.append([Tile.raster(1, m, m, at) for at in range(offset, offset + stop - start, m * m)])
            offset += stop - start
        return pictures
