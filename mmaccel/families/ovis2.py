"""Ovis2: a thumbnail and tiles; visual tokens are mixtures of words of a visual vocabulary, with marks between tiles."""

from __future__ import annotations

from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from .base import Facts
from .internvl import TiledByText
from .tower import EncoderCall


class Ovis2(TiledByText):
    """``L`` tokens a tile. Each picture begins with a mark, and one stands behind every tile; marks have embeddings of the
    visual vocabulary, but count as text."""

    name = "ovis2"
    model_types = ("ovis2",)
    place = 18
    facts = Facts("yes, tiled", clips=False, cls=False, merging="blocks that make a token")
    needs_processor = False
    layers_path = "transformer.encoder.layers"
    attention_name = "attention"

    @property
    def shuffle(self) -> int:
        return int(self.vision.hidden_stride)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        m = self.side // self.shuffle
        begins = ids == self.config.visual_indicator_token_ids[0]
        pictures: list[Picture] = []
        offset, before = 0, (-1, 0)
        for row, start, stop in self.runs(ids, encoded.tokens):
            since = before[1] if row == before[0] else 0
            if row != before[0] or bool(begins[row, since:start].any()):
                pictures.append([])
            pictures[-1] += [Tile.raster(1, m, m, offset + i * m * m) for i in range((stop - start) // (m * m))]
            offset, before = offset + stop - start, (row, stop)
        return pictures
