"""Times and keyframes of a video, read from its packets without decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import MmaccelError
from ...media.picture import PictureLimits, check_size
from .base import NotExactError, rate

#: of frames; processors enlarge a thin frame until its shorter side fits the model
LIMITS = PictureLimits(16_384, 1 << 27, 200)


@contextmanager
def opened(path: Path, kind: str) -> Iterator[tuple[Any, Any]]:
    """Open PyAV's container and video stream, for one decoding thread; refuses frames that exceed :data:`LIMITS`."""
    import av

    # naming the format leaves nothing to a guess; the whitelist leaves nothing but files
    with av.open(str(path), format=kind, options={"protocol_whitelist": "file"}) as container:
        # as other back ends choose: not a cover, which may come first
        stream = container.streams.best("video")
        if stream is None:
            raise MmaccelError(f"{str(path)!r} has no video stream; give a video file.")
        decoder = stream.codec_context
        # a stream that breaks off early does not tell
        if decoder.width and decoder.height:
            check_size((decoder.width, decoder.height), f"The video {str(path)!r}", LIMITS)
        # frames may become larger on the way
        decoder.options = {"max_pixels": str(LIMITS.pixels)}
        decoder.thread_count = 1
        yield container, stream


def matrix_of(frame: Any) -> np.ndarray:
    """Display matrix of a PyAV frame, ``[2, 2]`` int32, as :func:`~mmaccel.video.readers.base.upright` takes it.

    A frame that was asked stays in memory until the garbage collector runs: PyAV ties it into a cycle.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return np.eye(2, dtype=np.int32)
    return np.frombuffer(bytes(data), np.int32).reshape(3, 3)[:2, :2]


def alpha_of(frame: Any) -> bool:
    """Whether a frame of PyAV has an alpha channel."""
    return any(component.is_alpha for component in frame.format.components)


def first_matrix(path: Path, kind: str, reader: str) -> np.ndarray:
    """Display matrix of the first frame, for a ``reader`` that refuses frames with an alpha channel."""
    with opened(path, kind) as (container, stream):
        frame = next(container.decode(stream))
        if alpha_of(frame):
            raise NotExactError(f"{reader} drops the alpha channel; use another back end.")
        return matrix_of(frame)


@dataclass(frozen=True)
class Packets:
    """Times and keyframes of ``N`` frames, in display order.

    pts : ``[N]`` int64 in the stream's own unit, ascending; None where frames can only be counted.
    timestamps : ``[N]`` float64, seconds from the first frame.
    keyframes : ``[K]`` int64, the first 0.
    fps : mean number of frames a second.
    closed : no frame that is shown before a keyframe comes behind it in the file. Where one does (an open group of
        pictures), the output of a decoder after a seek does not begin with the keyframe.
    """

    pts: np.ndarray | None
    timestamps: np.ndarray
    keyframes: np.ndarray
    fps: float
    closed: bool

    @staticmethod
    def read(path: Path, kind: str) -> Packets:
        """Read the packets of a file once; refuses files without frames and files that break off."""
        import av

        with opened(path, kind) as (container, stream):
            try:
                packets = [p for p in container.demux(stream) if p.size]
            except (av.error.FFmpegError, OSError) as error:
                raise MmaccelError(
                    f"The video {str(path)!r} breaks off or is broken ({error.strerror}); copy or convert it again."
                ) from error
            declared, base = float(stream.average_rate or 0), float(stream.time_base or 0)
        # a recording may begin in the middle of a group
        first = next((i for i, p in enumerate(packets) if p.is_keyframe), 0)
        # an edit list may leave out frames that others are decoded from
        packets = [p for p in packets[first:] if not p.is_discard]
        if not packets:
            raise MmaccelError(f"The video {str(path)!r} has no frames; play or convert it first.")
        times = [p.pts for p in packets]
        if kind in ("mpeg", "mpegvideo") or None in times or len(set(times)) < len(times):
            # old containers do not tell the time of every frame
            fps = rate(np.zeros(1), declared)
            return Packets(None, np.arange(len(packets)) / fps, np.zeros(1, dtype=np.int64), fps, False)
        pts, key = np.asarray(times, dtype=np.int64), np.asarray([p.is_keyframe for p in packets])
        order = pts.argsort()
        begun = np.maximum.accumulate(np.where(key, pts, pts.min()))
        timestamps = (pts[order] - pts[order[0]]) * base
        keyframes = np.unique([0, *np.flatnonzero(key[order])])
        return Packets(pts[order], timestamps, keyframes, rate(timestamps, declared), bool((pts >= begun).all()))
