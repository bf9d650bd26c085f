"""Frames by PyAV, which brings its own, recent FFmpeg and reads more formats than the others."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import MmaccelError
from ...media.picture import on_white
from .base import Reader, upright
from .packets import Packets, alpha_of, matrix_of, opened

#: packets at the end that may hold no picture of their own (some encoders write such); the frame before is still shown
_EMPTY = 4


class PyAVReader(Reader):
    """A video opened by PyAV, with one decoding thread.

    All packets are read once, without decoding, to learn when every frame is shown and where decoding can begin.
    """

    name = "pyav"
    distributions = ("av",)
    modules = ("av",)

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind
        packets = Packets.read(path, kind)
        self._pts = packets.pts
        self.timestamps, self.keyframes, self.fps = packets.timestamps, packets.keyframes, packets.fps

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[float, np.ndarray]]:
        """Decode frames; seeks to the keyframe before each unless decoding is past it."""
        import av

        cursor = None
        # by rotation, which costs nothing to ask
        matrices: dict[int, np.ndarray] = {}
        try:
            with opened(self._path, self._kind) as (container, stream):
                # a stream may change its size on the way; the one it begins with holds
                size = stream.codec_context.width, stream.codec_context.height
                for index in indices:
                    key = int(self.keyframes.searchsorted(index, "right")) - 1
                    if cursor is None or self.keyframes[key] > cursor.place:
                        cursor = self._cursor(container, stream, key)
                    frame = cursor.shown(index)
                    if frame.rotation not in matrices:
                        matrices[frame.rotation] = matrix_of(frame)
                    yield float(self.timestamps[index]), upright(_rgb(frame, *size), matrices[frame.rotation])
        except (av.error.FFmpegError, EOFError) as error:
            if getattr(error, "errno", None) == errno.ENOMEM:
                raise MemoryError from error
            when = self.timestamps[max(0, cursor.place if cursor else 0)]
            raise MmaccelError(
                f"The video {str(self._path)!r} breaks off or is damaged after {when:.1f} of {self.timestamps[-1]:.1f} "
                "seconds; copy or convert it again."
            ) from error

    def _cursor(self, container: Any, stream: Any, key: int) -> Cursor:
        """A cursor at keyframe number ``key``, or at an earlier one where seeking goes too far."""
        back = 0
        while key or back:
            start = max(0, key - back)
            assert self._pts is not None
            container.seek(int(self._pts[self.keyframes[start]]), stream=stream)
            cursor = Cursor(self._numbered(container.decode(stream)), len(self._pts))
            if start == 0 or cursor.begins() <= self.keyframes[key]:
                return cursor
            back = 2 * back + 1
        return Cursor(self._numbered(container.decode(stream)), len(self.timestamps))

    def _numbered(self, frames: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        for count, frame in enumerate(frames):
            yield count if self._pts is None else int(self._pts.searchsorted(frame.pts)), frame

    def twin(self) -> PyAVReader:
        """The reader itself; every call of :meth:`frames` opens the file again."""
        return self


class Cursor:
    """Forward decoder of numbered, ascending ``frames``; ``total`` is the length of the video."""

    def __init__(self, frames: Iterator[tuple[int, Any]], total: int) -> None:
        self._frames, self._total = frames, total
        self._next: tuple[int, Any] | None = None
        self._shown: Any = None
        self.place = -1

    def begins(self) -> int:
        """Number of the first frame; the total if there is none."""
        self._next = next(self._frames, None)
        return self._total if self._next is None else self._next[0]

    def shown(self, index: int) -> Any:
        """The frame shown at ``index``; the one before if its packet held no picture."""
        while self.place < index:
            following, self._next = self._next or next(self._frames, None), None
            if following is None:
                if self._shown is None or index - self.place > _EMPTY:
                    raise EOFError
                break
            if following[0] > index and self._shown is not None:
                self._next = following
                break
            self.place, self._shown = following
        return self._shown


def _rgb(frame: Any, width: int, height: int) -> np.ndarray:
    """``[H, W, 3]`` uint8 as stored, on white."""
    size = {"width": width or frame.width, "height": height or frame.height}
    picture = frame.to_ndarray(format="rgba" if alpha_of(frame) else "rgb24", **size)
    return on_white(picture)
