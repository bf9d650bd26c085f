"""Uniform: evenly spaced frames, the baseline that knows only their order."""

import numpy as np

from ..method import FrameChoice, register


@register
class UniformFrames(FrameChoice):
    """The middle of each of ``retain * T`` equal stretches of the clip."""

    name = "uniform-frames"
    summary = "evenly spaced frames (baseline)"

    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        """``frames [T, H, W, 3]`` -> ``[count]``."""
        return middles(len(frames), count)


def middles(total: int, count: int) -> np.ndarray:
    """``[count]`` int64: the middle of each of ``count`` equal stretches of ``total`` frames."""
    return (2 * np.arange(count) + 1) * total // (2 * count)
