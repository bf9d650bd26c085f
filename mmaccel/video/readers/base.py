"""Base of back ends: open a video, list the times of its frames, decode some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import numpy as np

from ...errors import MmaccelError


class NotExactError(MmaccelError):
    """The back end would return other frames than the wanted ones."""


class Reader(ABC):
    """One opened video.

    timestamps : ``[N]`` float64, when every frame is shown, in seconds from the first, ascending.
    keyframes : ``[K]`` int64, indices of the frames that can be decoded without another, ascending, the first 0.
    fps : mean number of frames a second.
    """

    name: ClassVar[str]
    #: the distributions to install, and the modules that must be importable
    distributions: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]]

    timestamps: np.ndarray
    keyframes: np.ndarray
    fps: float

    @classmethod
    def load(cls) -> None:
        """Import the back end; any exception means that it is not available."""
        for module in cls.modules:
            import_module(module)

    @abstractmethod
    def __init__(self, path: Path, kind: str) -> None:
        """Open a local file of one of the :data:`~mmaccel.video.container.KINDS`; any exception means failure."""

    @abstractmethod
    def frames(self, indices: Sequence[int]) -> Iterator[tuple[float, np.ndarray]]:
        """For each of ``indices`` (ascending, no repeats) its timestamp and picture, ``[H, W, 3]`` uint8 RGB, upright."""

    @abstractmethod
    def twin(self) -> Reader:
        """A reader of the same file that another thread may use at the same time."""


def upright(picture: np.ndarray, matrix: np.ndarray, turned: int = 0) -> np.ndarray:
    """Rotate and mirror a frame ``picture [H, W, 3]`` as a player shows it.

    matrix : ``[2, 2]``; ``(x, y) @ matrix`` is the place on the screen of column x and row y of the stored frame, but for a
        shift. Of angles that are no quarter turns the nearest is taken, and scale is ignored.
    turned : quarter turns, counterclockwise, that the decoder has made already.
    """
    picture = np.rot90(picture, -turned)
    across, down = matrix.diagonal()
    if abs(matrix).trace() < abs(matrix)[::-1].trace():
        picture = picture.swapaxes(0, 1)
        down, across = matrix[::-1].diagonal()[::-1]
    return picture[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1]


def rate(timestamps: np.ndarray, declared: float) -> float:
    """Frames a second: as declared by the container if that fits ``timestamps [N]`` (seconds from 0), else their mean."""
    steps = len(timestamps) - 1
    if steps < 1 or timestamps[-1] <= 0:
        return declared if 0 < declared < 1000 else 1.0
    # a frame more or less at the end is no sign of a variable rate
    if 0 < declared < 1000 and abs(timestamps[-1] * declared - steps) <= max(1.0, 0.01 * steps):
        return declared
    return float(steps / timestamps[-1])
