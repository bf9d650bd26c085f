"""Idefics3 and SmolVLM: split images with row and column tokens, a global view, pixel shuffle; SigLIP tower."""

from __future__ import annotations

import re

from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from .base import Facts
from .internvl import TiledByText
from .tower import EncoderCall

_TILE = re.compile(r"<row_(\d+)_col_(\d+)>\s*$")
_GLOBAL = re.compile(r"<global-img>\s*$")
_FRAME = re.compile(r"Frame from \d+:\d+:\s*(?:<fake_token_around_image>)?\s*(?:<global-img>)?\s*$")
#: the text between two frames of one clip; every clip is introduced by a sentence
_NEXT = re.compile(r"\s*(?:<fake_token_around_image>)?\s*" + _FRAME.pattern)


class Idefics3(TiledByText):
    """``L`` tokens a tile. With a processor, tiles up to their global view are one picture; without it every tile is a
    picture."""

    name = "idefics3"
    model_types = ("idefics3",)
    place = 11
    facts = Facts("yes, tiled", clips=False, cls=False, merging="blocks of pixel shuffle")
    text_name = "text_model"
    tower_names = {"image": "vision_model", "video": "vision_model"}

    @property
    def shuffle(self) -> int:
        return int(self.config.scale_factor)

    @property
    def feature_layer(self) -> int:
        return self.tower_depth - 1

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        m, pictures = self.cells, list[Picture]()
        offset, row_before, stop_before = 0, -1, 0
        open_tiles, frame = False, 0
        for row, start, stop in self.runs(ids, encoded.tokens):
            text = self.text_before(ids, row, start)
            is_frame, is_tile = bool(_FRAME.search(text)), bool(_TILE.search(text))
            if is_frame:
                between = self.text_before(ids, row, start, start - stop_before)
                joins = row == row_before and frame > 0 and bool(_NEXT.match(between))
            else:
                joins = row == row_before and open_tiles
            frame = frame + 1 if is_frame and joins else int(is_frame)
            tiles = [
                Tile.raster(1, m, m, offset + i * m * m, frame=max(frame - 1, 0))
                for i in range((stop - start) // (m * m))
            ]
            if joins:
                pictures[-1].extend(tiles)
            else:
                pictures.append(tiles)
            # tiles stay open until their global view has come
            open_tiles = is_tile and not _GLOBAL.search(text)
            row_before, stop_before = row, stop
            offset += stop - start
        return pictures


class SmolVLM(Idefics3):
    """As Idefics3. With a processor, frames that follow "Frame from 00:00:", "Frame from 00:01:", ... are one clip; without it
    every frame is a picture."""

    name = "smolvlm"
    model_types = ("smolvlm",)
    place = 10
    facts = Facts("yes, tiled", cls=False, merging="blocks of pixel shuffle")
