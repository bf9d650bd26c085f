"""Ovis2: a thumbnail and tiles; visual tokens are mixtures of words of a visual vocabulary, with marks between tiles."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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

    @property
    def shuffle(self) -> int:
        """The tower's stride."""
        return int(self.vision.hidden_stride)

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """Below the visual vocabulary."""
        return list(tower.transformer.encoder.layers)

    def attention_of(self, layer: Any) -> nn.Module:
        """Ovis2 names it ``attention``."""
        found: nn.Module = layer.attention
        return found

    def second_half(self, layer: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Ovis2 has names of its own."""
        return layer.get_submodule("rms_norm2"), layer.get_submodule("ffn")

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """One segment a tile, the whole picture first."""
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
