"""Ovis2: a thumbnail and tiles; visual tokens are mixtures of words of a visual vocabulary, with marks between tiles."""

from __future__ import annotations

from torch import Tensor

from ..core.layout import Modality, Picture
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
    marks_need_pixels = True
    layers_path = "transformer.encoder.layers"
    attention_name = "attention"

    @property
    def shuffle(self) -> int:
        return int(self.vision.hidden_stride)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        marks = ids == self.config.visual_indicator_token_ids[0]
        return self.by_run(ids, encoded, lambda row, last, start: bool(marks[row, last:start].any()))
