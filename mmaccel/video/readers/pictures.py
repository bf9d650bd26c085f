"""A folder of pictures as a video."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import MmaccelError
from ...media.picture import load_picture
from .base import Reader

#: of files that are frames
SUFFIXES = tuple(".png .jpg .jpeg .jpe .jfif .bmp .webp .tif .tiff .ppm .pgm .avif .jp2".split())


class PicturesReader(Reader):
    """Reader of a folder of pictures of one size, at a constant rate, in the order of their names; ``frame10`` comes
    after ``frame9``."""

    name = "pictures"
    distributions = ("pillow",)
    modules = ("PIL",)

    def __init__(self, path: Path, kind: str, fps: float = 1.0) -> None:
        self._path = path
        self._files = sorted((p for p in path.iterdir() if p.suffix.lower() in SUFFIXES), key=_natural)
        if not self._files:
            raise MmaccelError(f"The folder {str(path)!r} holds no frames; it needs files such as 0001.png.")
        self.fps = fps
        self.timestamps = np.arange(len(self._files)) / fps
        self.keyframes = np.arange(len(self._files))

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[float, np.ndarray]]:
        """Load each picture from its file."""
        first: tuple[int, int] | None = None
        for index in indices:
            picture = load_picture(self._files[index])
            first = first or picture.size
            if picture.size != first:
                raise MmaccelError(
                    f"The frames in {str(self._path)!r} differ in size ({first}, {picture.size}); a clip has one."
                )
            yield float(self.timestamps[index]), np.asarray(picture)

    def twin(self) -> PicturesReader:
        """The reader itself; reading changes nothing."""
        return self


def _natural(path: Path) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path.name)]
