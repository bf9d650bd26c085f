"""Granite Docling: pages in tiles with a thumbnail, marked as Idefics3's; pixel shuffle of two densities, and DeepStack."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import JOINED, Facts, block_mean, consecutive, raster_blocks
from .internvl import TiledByText
from .tower import CLIP_STD, EncoderCall

#: the mark of the tile that a page begins with
_FIRST = re.compile(r"<row_1_col_1>\s*$")


class GraniteDocling(TiledByText):
    """Tiles row by row, the whole page last. With a processor, tiles up to the next page's first are one picture; without it
    every tile is one. DeepStack adds features of several tower layers behind the first layers of the language model."""

    name = "granite_docling"
    model_types = ("granite_docling",)
    since = "5.23"
    facts = Facts("yes, tiled", clips=False, cls=False, merging="-")
    reads_pages = True
    whole = JOINED
    usual_std = CLIP_STD
    text_name = "text_model"
    tower_names = {"image": "vision_model"}

    def __init__(self, model: Any, processor: Any = None) -> None:
        super().__init__(model, processor)
        self.deepstack = len(self.vision.deepstack_visual_indexes)

    @property
    def read_layers(self) -> list[int]:
        return [*(layer + 1 for layer in self.vision.deepstack_visual_indexes), -1]

    @property
    def shuffle(self) -> int:
        return int(self.vision.scale_factor)

    def shuffled(self, encoded: EncoderCall) -> int:
        """:attr:`shuffle` of one call: half of it where the processor asked for the fine route."""
        return self.shuffle if encoded.arguments.get("tile_fine_mask") is None else self.shuffle // 2

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """The blocks that pixel shuffle joins."""
        return raster_blocks(self.side, self.shuffled(encoded))

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        cells, pictures = self.side // self.shuffled(encoded), list[list[tuple[int, int, int]]]()
        for row, start, stop in self.runs(ids, encoded.tokens):
            text = self.text_before(ids, row, start)
            # without a processor there is no text
            if not text or _FIRST.search(text):
                pictures.append([])
            pictures[-1] += [(1, cells, cells)] * ((stop - start) // cells**2)
        return consecutive(pictures)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        return block_mean(torch.cat(values), self.side, self.shuffled(encoded)).flatten(0, 1)

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = super().logits(states) / self.config.text_config.logits_scaling
        return logits
