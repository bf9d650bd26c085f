"""InternVL: tiles with a thumbnail, pixel shuffle 2x2; a clip is a run of frames, each introduced by text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.layout import Modality, Picture, Tile
from .base import Facts, Family, block_mean, consecutive, raster_blocks
from .tower import IMAGENET_STD, EncoderCall

_FRAME = re.compile(r"Frame\s*(\d+)\s*:\s*(?:<img>)?\s*$")


class TiledByText(Family):
    """Base of families whose tiles and frames are separate runs of placeholders of equal length in the prompt."""

    needs_processor = True

    @property
    def shuffle(self) -> int:
        """Patches along one side of the block that becomes one token."""
        return int(round(1 / self.config.downsample_ratio))

    @property
    def cells(self) -> int:
        return self.side // self.shuffle

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """The blocks that pixel shuffle joins."""
        return raster_blocks(self.side, self.shuffle)

    def runs(self, ids: Tensor, tokens: int, visual: Tensor | None = None) -> list[tuple[int, int, int]]:
        """Runs of placeholders, by default all (``visual [B, S]`` bool): (row, first, last + 1), row by row, of the rows whose
        pictures were encoded.

        ``tokens`` were encoded: where ``generate`` has repeated every row since (beams), only the first copy counts.
        """
        visual = self.visual(ids) if visual is None else visual
        copies = max(1, int(visual.sum()) // max(1, tokens))
        rows = pad(visual, (1, 1)).int().diff()[::copies]
        bounds = ((rows == edge).nonzero().tolist() for edge in (1, -1))
        return [(copies * row, start, stop) for (row, start), (_, stop) in zip(*bounds, strict=True)]

    def by_run(
        self, ids: Tensor, encoded: EncoderCall, begins: Callable[[int, int, int], bool] = lambda row, last, start: True
    ) -> list[Picture]:
        """Pictures of tiles of one size, several in a run.

        ``begins(row, last, start)`` says whether the run at ``start`` begins a picture, where the run before it ended at
        ``last``; the first one of a row does.
        """
        size, before = (1, self.cells, self.cells), (-1, 0)
        pictures: list[list[tuple[int, int, int]]] = []
        for row, start, stop in self.runs(ids, encoded.tokens):
            if row != before[0] or begins(row, before[1], start):
                pictures.append([])
            pictures[-1] += [size] * ((stop - start) // self.cells**2)
            before = row, stop
        return consecutive(pictures)

    def sized(
        self,
        ids: Tensor,
        runs: list[tuple[int, int, int]],
        sizes: Iterable[tuple[int, int]],
        joins: Callable[[str], Literal["tile", "frame"] | None],
    ) -> list[Picture]:
        """Pictures of tiles of ``sizes`` (rows, columns), one segment a tile.

        ``joins`` says of the text between two ``runs`` of a row whether the second is another tile of the picture before, its
        next frame, or neither; so are tiles without text between them.
        """
        tiles = iter(sizes)
        pictures: list[Picture] = []
        offset, frame, before = 0, 0, (-1, 0)
        for row, start, stop in runs:
            between = self.text_before(ids, row, start, start - before[1]) if row == before[0] else ""
            kind, before, end = joins(between), (row, stop), offset + stop - start
            while offset < end:
                height, width = next(tiles)
                frame = frame + 1 if kind == "frame" else frame if kind else 0
                if not kind:
                    pictures.append([])
                pictures[-1].append(Tile.raster(1, height, width, offset, frame=frame))
                kind, offset = None, offset + height * width
        return pictures

    def text_before(self, ids: Tensor, row: int, place: int, most: int = 24) -> str:
        """The prompt's text just before a place; empty without a processor."""
        if self.processor is None:
            return ""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        return str(tokenizer.decode(ids[row, max(0, place - most) : place].tolist()))

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        return block_mean(torch.cat(values), self.side, self.shuffle).flatten(0, 1)


class InternVL(TiledByText):
    """A run of ``tiles * L`` tokens is an image. With a processor, runs that follow "Frame1: ", "Frame2: ", ... are one
    clip; without it every frame is an image."""

    name = "internvl"
    model_types = ("internvl",)
    place = 9
    facts = Facts("yes, tiled", merging="blocks of pixel shuffle")
    layers_path = "encoder.layer"
    attention_name = "attention"

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        m, pictures = self.cells, list[Picture]()
        offset = expected = 0
        for row, start, stop in self.runs(ids, encoded.tokens):
            frame = _FRAME.search(self.text_before(ids, row, start))
            number = int(frame.group(1)) if frame else 0
            if number > 1 and number == expected:
                pictures[-1].append(Tile.raster(1, m, m, offset, frame=number - 1))
            else:
                count = (stop - start) // (m * m)
                pictures.append([Tile.raster(1, m, m, offset + i * m * m) for i in range(count)])
            expected = number + 1
            offset += stop - start
        return pictures


class QianfanOCR(InternVL):
    """As InternVL, without clips; the layers of its tower lie directly in it."""

    name = "qianfan_ocr"
    model_types = ("qianfan_ocr",)
    place = 1000
    facts = Facts("yes, tiled", clips=False, merging="blocks of pixel shuffle")
    reads_pages = True
    layers_path = "layers"
    usual_std: ClassVar[tuple[float, ...]] = IMAGENET_STD

    @property
    def has_cls(self) -> bool:
        return True
