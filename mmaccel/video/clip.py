"""Frames of a video, and when they are shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Clip:
    """Frames of one video.

    frames : ``[T, H, W, 3]`` uint8 RGB, upright.
    indices : which of the video's frames they are, ascending.
    total : how many frames the video has.
    fps : its frames a second; with a variable frame rate the mean.
    timestamps : ``[T]`` float64, seconds from the first frame of the video; by default ``indices / fps``.
    backend : what read it: ``decord``, ``torchcodec``, ``pyav``, ``pictures``, or nothing.
    """

    frames: np.ndarray
    indices: list[int]
    total: int
    fps: float
    timestamps: np.ndarray = None  # type: ignore[assignment]
    backend: str = ""

    def __post_init__(self) -> None:
        if self.timestamps is None:
            object.__setattr__(self, "timestamps", np.asarray(self.indices, dtype=np.float64) / self.fps)

    @property
    def duration(self) -> float:
        """Of the whole video, in seconds."""
        return self.total / self.fps

    def metadata(self) -> Any:
        """What processors of transformers want to know.

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
