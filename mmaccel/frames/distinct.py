"""Distinct frames: what has hardly changed since the frame before is not shown again."""

import numpy as np
from PIL import Image

from ..method import FrameChoice, register
from .uniform import middles

#: sides of the pictures that frames are compared in
_THUMBNAIL = 32


@register
class DistinctFrames(FrameChoice):
    """Temporal de-duplication on pixels: a frame stays if it differs from the last one that stayed.

    The difference is the mean over pixels and colours of thumbnails (32 x 32), absolute, from 0 to 255. The first frame
    stays. If more than ``retain`` of the frames are left, evenly spaced ones of them are taken.

    Parameters
    ----------
    threshold : the least difference of a frame that stays. Compression leaves about 1 between frames that look the same;
        the default 3.0 was chosen by hand.
    """

    name = "distinct-frames"
    summary = "frames that differ from the one shown before (temporal de-duplication)"
    budget = "at_most"
    default_retain = 1.0
    limits = {"threshold": "[0, 255]"}

    threshold: float = 3.0

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T']`` int64 ascending; fewer than the budget where little changes."""
        different = distinct(thumbnails(frames), self.threshold) if len(frames) > 1 else np.arange(len(frames))
        room = len(super().choose(frames, retain))
        return different if len(different) <= room else different[middles(len(different), room)]

    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        """Only their number matters."""
        return np.arange(count)


def distinct(small: np.ndarray, threshold: float) -> np.ndarray:
    """``[T']`` int64 ascending: frames of ``small [T, h, w, c]`` that differ from the last one before them that is in it."""
    chosen = [0]
    for at in range(1, len(small)):
        if np.abs(small[at] - small[chosen[-1]]).mean() > threshold:
            chosen.append(at)
    return np.asarray(chosen)


def thumbnails(frames: np.ndarray, mode: str = "RGB") -> np.ndarray:
    """``[T, H, W, 3]`` uint8 -> ``[T, 32, 32, 3]`` float32 from 0 to 255, in a colour space of PIL."""
    size = (_THUMBNAIL, _THUMBNAIL)
    small = [Image.fromarray(frame).resize(size, Image.Resampling.BOX).convert(mode) for frame in frames]
    return np.stack([np.asarray(picture, dtype=np.float32) for picture in small])
