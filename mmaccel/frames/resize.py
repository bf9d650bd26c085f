"""Resize: show the model a smaller picture, the baseline that saves everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ..method import FramesMethod, register

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

#: no side is made shorter than this
SHORTEST = 16


@register
class Resize(FramesMethod):
    """Shrink pictures until their area is ``retain`` of what it was; keeps the aspect ratio.

    Sides are multiplied by ``sqrt(retain)`` and rounded, with antialiased bicubic interpolation; nothing is enlarged.
    Models that read a picture at its own resolution (Qwen, tiled ones) then make fewer tokens; a model that scales
    everything to one size (LLaVA-1.5) makes as many as before and only sees less. VTC-Bench (arXiv 2510.07143) finds
    plain downsampling ahead of many methods that compress tokens, which is why it is a method here.

    Parameters
    ----------
    frames : share of the frames of a clip that stay, evenly spaced. The area of those is then ``retain / frames`` (at
        most 1), so that ``retain`` stays the share of all pixels. The default 1.0 keeps all.
    """

    name = "resize"
    summary = "smaller pictures (baseline)"
    limits = {"frames": "(0, 1]"}

    frames: float = 1.0

    def picture(self, image: PILImage, retain: float) -> PILImage:
        """One picture; palettes become RGB, as they cannot be interpolated."""
        size = shrunk(image.size, retain)
        if size == image.size:
            return image
        image = image.convert("RGB") if image.mode in ("P", "1") else image
        return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T']``: the middle of each of ``T'`` equal stretches of the clip."""
        total = len(frames)
        stay = max(1, int(total * self.frames + 0.5)) if total else 0
        return (2 * np.arange(stay) + 1) * total // max(1, 2 * stay)

    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T, H, W, 3]`` uint8 -> ``[T', H', W', 3]``; all frames get the same size."""
        stay = self.choose(frames, retain)
        if not len(stay):
            return frames
        area = min(1.0, retain * len(frames) / len(stay))
        return np.stack([np.asarray(self.picture(Image.fromarray(frame), area)) for frame in frames[stay]])


def shrunk(size: tuple[int, int], retain: float) -> tuple[int, int]:
    """(width, height) with ``retain`` of the area, no side below the shortest unless it was."""
    side = retain**0.5
    width, height = (min(s, max(SHORTEST, int(s * side + 0.5))) for s in size)
    return width, height
