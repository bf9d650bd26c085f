"""Frames by decord, which brings its own FFmpeg 4 and seeks in C++."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .base import NotExactError, Reader, upright
from .packets import Packets, first_matrix

#: frames fetched at once, a bound on memory
_BATCH = 8


class DecordReader(Reader):
    """A video opened by decord, with one decoding thread.

    alone : this process does nothing but decode, and will never read pictures with torchvision.

    decord 0.6 counts the frames that come out after a seek and says nothing when the count is wrong, as it is in open groups
    of pictures (the default of x265), with B-frames of older codecs, and in other containers than mp4 and Matroska. So
    the packets are read first, by PyAV, and such files are left to the other back ends.
    """

    name = "decord"
    distributions = ("decord", "av")
    modules = ("decord", "av")

    alone: ClassVar[bool] = False

    @classmethod
    def load(cls) -> None:
        """Import torchvision first: decord loads a zlib for the whole process, with which torchvision reads no PNG."""
        if not cls.alone:
            with suppress(ImportError, OSError):
                import_module("torchvision.io")
        super().load()

    def __init__(self, path: Path, kind: str) -> None:
        import decord

        if kind not in ("mov", "matroska"):
            raise NotExactError(f"decord is not exact in {kind} files; use another back end.")
        packets = Packets.read(path, kind)
        if not packets.closed:
            raise NotExactError("decord is not exact in open groups of pictures; use another back end.")
        self._matrix = first_matrix(path, kind, self.name)
        # mirrors are turns to decord, other angles nothing, and in Matroska it turns nothing at all
        straight = np.count_nonzero(self._matrix) == 2
        across, down = self._matrix[0]
        self._turned = int(np.rint(np.arctan2(-down, across) / (np.pi / 2))) if kind == "mov" and straight else 0
        decord.logging.set_level(decord.logging.QUIET)
        self._path = path
        self.timestamps, self.keyframes, self.fps = packets.timestamps, packets.keyframes, packets.fps
        self._reader = self._opened()

    def _opened(self) -> Any:
        import decord

        # by default frames that cannot be decoded are silently replaced by others
        reader = decord.VideoReader(str(self._path), num_threads=1, fault_tol=1e-9)
        if len(reader) != len(self.timestamps):
            raise NotExactError(f"decord finds {len(reader)} frames, not {len(self.timestamps)}; use another back end.")
        return reader

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[float, np.ndarray]]:
        """Decode in small batches; decord seeks by itself."""
        for start in range(0, len(indices), _BATCH):
            batch = list(indices[start : start + _BATCH])
            pictures = self._reader.get_batch(batch).asnumpy()
            for time, picture in zip(self.timestamps[batch].tolist(), pictures, strict=True):
                yield time, upright(picture, self._matrix, self._turned)

    def twin(self) -> DecordReader:
        """A second reader of the file."""
        other = copy.copy(self)
        other._reader = self._opened()
        return other
