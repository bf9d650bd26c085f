"""Frames by torchcodec, which uses the FFmpeg libraries of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from .base import NotExactError, Reader, rate, upright
from .packets import first_matrix

_BATCH = 8


class TorchcodecReader(Reader):
    """A video opened by torchcodec, with one decoding thread.

    It has no time stamps before it decodes: frames are chosen as if the rate were constant, and decoded frames have their true
    times. PyAV tells how frames must be turned or mirrored.
    """

    name = "torchcodec"
    distributions = ("torchcodec", "av")
    modules = ("torchcodec.decoders", "av")

    def __init__(self, path: Path, kind: str) -> None:
        from torchcodec.decoders import VideoDecoder

        if kind in ("avi", "flv", "mpeg", "mpegvideo", "mpegts", "mxf", "yuv4mpegpipe", "ivf"):
            raise NotExactError(f"torchcodec is not exact in {kind} files; use another back end.")
        self._path, self._kind = path, kind
        # mirrors are turns to torchcodec
        self._matrix = first_matrix(path, kind, self.name)
        self._decoder = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1, device="cpu")
        about = self._decoder.metadata
        # before 0.11 it turned none, and did not tell
        self._turned = round((getattr(about, "rotation", None) or 0.0) / 90)
        self._start = float(about.begin_stream_seconds or 0.0)
        total = len(self._decoder)
        if not total:
            raise ValueError("it finds no frames")
        declared, seconds = float(about.average_fps_from_header or 0.0), float(about.duration_seconds or 0.0)
        # of the last frame only its end is known
        ends = np.linspace(0.0, seconds, total + 1)
        self.fps = rate(ends, declared)
        self.timestamps = np.arange(total) / self.fps
        # not in its public interface
        keys: Iterable[int] = getattr(self._decoder, "_get_key_frame_indices", list)()
        self.keyframes = np.unique([0, *map(int, keys)])

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[float, np.ndarray]]:
        """Decode in small batches; torchcodec seeks by itself."""
        for start in range(0, len(indices), _BATCH):
            batch = self._decoder.get_frames_at(list(indices[start : start + _BATCH]))
            times = (batch.pts_seconds.numpy() - self._start).tolist()
            for time, picture in zip(times, batch.data.numpy(), strict=True):
                yield time, upright(picture, self._matrix, self._turned)

    def twin(self) -> TorchcodecReader:
        """A second decoder of the file."""
        return TorchcodecReader(self._path, self._kind)
