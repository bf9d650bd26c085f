"""GOT-OCR2: one page, or tiles of one, each read by a tower like that of SAM."""

from __future__ import annotations

import math

from torch import Tensor

from ..core.layout import Modality, Picture
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
    needs_processor = False
    reads_pages = True
    layers_path = ""

    @property
    def cells(self) -> int:
        # two convolutions halve the sides
        return math.ceil(self.side / 4)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        return self.by_run(ids, encoded)
