"""Frames of a video and their times."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..errors import MmaccelError


def as_frames(given: Any) -> np.ndarray:
    """Frames ``[T, H, W, 3]`` uint8, which may share the memory of ``given``; refuses what is no such array."""
    try:
        frames = np.asarray(given)
    except Exception:
        # frames of several sizes, a tensor of another device, anything else that arrays are not made of
        frames = np.asarray(None)
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or 0 in frames.shape[1:3]:
        plain = frames.dtype == object or not frames.ndim
        what = type(given).__name__ + ("" if plain else f" of {frames.dtype} {list(frames.shape)}")
        raise MmaccelError(
            f"Frames are one array [T, H, W, 3] of uint8, RGB and all of one size, not {what}; a single picture is "
            "np.asarray(picture.convert('RGB'))[None]."
        )
    return frames


def as_rate(fps: Any) -> float:
    """Validate frames a second: a finite number above 0."""
    known = isinstance(fps, (int, float, np.integer, np.floating)) and not isinstance(fps, bool)
    if not (known and math.isfinite(fps) and fps > 0):
        raise MmaccelError(f"Frames a second must be finite, with fps > 0, not {fps!r}.")
    return float(fps)


@dataclasses.dataclass(frozen=True)
class Clip:
    """Frames of one video.

    frames : ``[T, H, W, 3]`` uint8 RGB, upright.
    indices : which of the video's frames they are, ascending.
    total : how many frames the video has.
    fps : its frames a second; with a variable frame rate the mean.
    timestamps : ``[T]`` float64, seconds from the first frame of the video; by default ``indices / fps``.
    backend : what read it: ``decord``, ``torchcodec``, ``pyav``, ``pictures``, or nothing.

    Raises
    ------
    MmaccelError
        If there is no frame, frames are no such array, or times do not fit them, are not finite, or go backwards.
    """

    frames: np.ndarray
    indices: list[int]
    total: int
    fps: float
    timestamps: np.ndarray = None  # type: ignore[assignment]
    backend: str = ""

    def __post_init__(self) -> None:
        count, fps = len(as_frames(self.frames)), as_rate(self.fps)
        times = self.indices if self.timestamps is None else self.timestamps
        times = np.asarray(times, dtype=np.float64) / (fps if self.timestamps is None else 1.0)
        object.__setattr__(self, "timestamps", times)
        if not count or times.shape != (count,) or not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise MmaccelError(
                f"A clip of {count} frames needs one or more of them and as many times in seconds, which are finite and do "
                "not go backwards; see indices, fps and timestamps."
            )

    @property
    def duration(self) -> float:
        """Length of the whole video in seconds."""
        return self.total / self.fps

    def metadata(self) -> Any:
        """Metadata as processors of transformers take it.

        They divide ``frames_indices`` by ``fps`` to tell the model the time, so the indices are those of a constant frame
        rate: with a variable one, not the frames' own.
        """
        from transformers.video_utils import VideoMetadata

        return VideoMetadata(
            total_num_frames=self.total,
            fps=self.fps,
            width=self.frames.shape[2],
            height=self.frames.shape[1],
            duration=self.duration,
            video_backend=self.backend or None,
            frames_indices=np.rint(self.timestamps * self.fps).astype(int).tolist(),
        )
