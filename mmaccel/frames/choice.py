"""What methods share that only choose frames of a clip."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from PIL import Image

from ..core.budget import resolve
from ..method import FramesMethod

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

#: sides of the pictures that frames are compared in
_THUMBNAIL = 32


class FrameChoice(FramesMethod):
    """``retain`` of the frames of a clip stay, as they are and at least one; pictures are left alone."""

    budget: ClassVar[Literal["exact", "at_most", "adaptive", "none"]] = "exact"
    only_chooses = True

    @abstractmethod
    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        """``count`` of ``frames [T, H, W, 3]``, ``0 < count < T``: their indices, ascending."""

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T']`` int64 ascending: the frames that stay."""
        total = len(frames)
        count = resolve(retain, total) if total else 0
        if count >= total:
            return np.arange(total)
        return self.pick(frames, count)

    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T, H, W, 3]`` uint8 -> ``[T', H, W, 3]``."""
        return frames[self.choose(frames, retain)]

    def picture(self, image: PILImage, retain: float) -> PILImage:
        """One picture, as it is."""
        return image


def middles(total: int, count: int) -> np.ndarray:
    """``[count]`` int64: the middle of each of ``count`` equal stretches of ``total`` frames."""
    return (2 * np.arange(count) + 1) * total // (2 * count)


def over_scenes(scenes: list[tuple[int, int]], count: int) -> np.ndarray:
    """``count`` frames spread over scenes, ascending: one each, the others by length, all in the middle of their stretch.

    Parameters
    ----------
    scenes : first and last frame of each, without gaps; at most ``count``.
    """
    lengths = np.asarray([last - first + 1 for first, last in scenes])
    shares = np.ones(len(scenes), dtype=np.int64)
    for _ in range(count - len(scenes)):
        # where a frame now stands for most others; the earlier scene on a tie
        shares[np.where(shares < lengths, lengths / shares, 0).argmax()] += 1
    parts = [
        first + middles(int(length), int(share))
        for (first, _), length, share in zip(scenes, lengths, shares, strict=True)
    ]
    return np.concatenate(parts)


def thumbnails(frames: np.ndarray, mode: str = "RGB") -> np.ndarray:
    """``[T, H, W, 3]`` uint8 -> ``[T, 32, 32, 3]`` float32 from 0 to 255, in a colour space of PIL."""
    size = (_THUMBNAIL, _THUMBNAIL)
    small = [Image.fromarray(frame).resize(size, Image.Resampling.BOX).convert(mode) for frame in frames]
    return np.stack([np.asarray(picture, dtype=np.float32) for picture in small])
