"""HunyuanOCR: pages of any size, patches row by row; marks around a picture and behind its rows are visual tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.layout import Modality, Picture, Tile
from ..errors import UnsupportedError
from .paddleocr_vl import RasterVL
from .tower import EncoderCall


class HunYuanVL(RasterVL):
    """One token per block of 2x2 patches, in raster order. Text has the same position on all axes, and so have the marks around
    a picture; tokens inside have their column, their row and the number of the picture on the last three axes. Queries and keys
    are normalised behind RoPE, so keys cannot be turned to other positions.
    """

    name = "hunyuan_vl"
    model_types = ("hunyuan_vl",)
    place = 20
    reads_pages = True
    tower_names = {"image": "vision_tower"}
    layers_path = "layers"
    joins_along = 1
    halves = False
    numbers_pictures = True
    undivided = "counts columns and rows of every picture from 0"

    @property
    def axes(self) -> int:
        """Column, row and picture, and perhaps one in front of them that counts tokens."""
        return len(self.config.text_config.rope_parameters["mrope_section"])

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        offset, pictures = 0, list[Picture]()
        for _, h, w in self.grids(modality, encoded):
            cells, source = torch.full((h, w + 1, 3), -1), torch.full((h, w + 1), -1)
            plain = Tile.raster(1, h, w, offset)
            cells[:, :w], source[:, :w] = plain.cells.view(h, w, 3), plain.source.view(h, w)
            mark = torch.tensor([-1])
            ends = mark.expand(1, 3)
            cells = torch.cat([ends, cells.flatten(0, 1), ends])
            pictures.append([Tile(plain.grid, cells, torch.cat([mark, source.flatten(), mark]))])
            offset += h * w
        return pictures

    def in_generate(self, text: Tensor, new: Tensor | None = None) -> Tensor:
        """There is no axis beside those of RoPE."""
        return text.expand(self.axes, -1, -1) if new is None else new

    def behind(self, new: Tensor, start: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        """Text goes on behind the cache; columns and rows count from 0, and pictures behind those ``before [B, seen]``."""
        if before is None:
            raise UnsupportedError(
                f"{self.name} counts the pictures of a conversation, and a kept cache does not say how many it holds; call "
                "generate with the ids of the whole conversation, or give position_ids."
            )
        counted = torch.ones_like(new[0]) if mask is None else mask.to(new)
        # a column is less than the number of tokens in front of it
        inside = new[-3] != (counted.cumsum(1) - 1).clamp(min=0)
        first = pad(self.visual(before), (1, 0)).int().diff() > 0
        moved = new + start[None, :, None]
        moved[-3:-1] = torch.where(inside, new[-3:-1], moved[-3:-1])
        moved[-1] = torch.where(inside, new[-1] + first.sum(1, keepdim=True).to(new), moved[-1])
        return moved
