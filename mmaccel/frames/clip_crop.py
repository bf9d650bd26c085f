"""clip-CROP: show the model the region of a picture that CLIP finds most like the question."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UnsupportedError
from ..method import FramesMethod, register
from .clip import FrameEncoder
from .resize import SHORTEST, shrunk
from .uniform import middles

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

#: frames of a clip that are looked at
_LOOKED = 4
#: (left, top, right, bottom)
Box = tuple[int, int, int, int]


@register
class ClipCrop(FramesMethod):
    """A region of every picture, with ``retain`` of its area, that is like the question.

    *Towards Perceiving Small Visual Details in Zero-shot Visual Question Answering with Multimodal LLMs* (clip-CROP),
    arXiv 2310.16033.

    Windows of the picture's shape, with ``retain`` of its area, stand at most half a window apart; the one stays whose CLIP
    embedding has the highest cosine with that of the question, the first on a tie. With ``cut`` the region is looked for as in
    the paper: beginning with the whole picture, ``cut`` of its height is cut off below or above, or ``cut`` of its width on the
    right or the left, and of the four regions the most like the question stays, until ``retain`` of the area is left, which
    the last cut meets.

    Pixels stay as they are: models that read a picture at its own resolution (Qwen, tiled ones) make fewer tokens of it, in the
    vision tower and behind it; a model that scales everything to one size (LLaVA-1.5) makes as many as before, and sees the
    region larger. The rest of the picture cannot be asked about any more.

    Parameters
    ----------
    query : the question, or better what it is about: CLIP knows captions. A processor is prepared for each question,
        ``prepare(processor, "clip-crop", query=question, clip_model=...)``, which costs nothing.
    clip_model : a folder of an open_clip model, or ``NAME:WEIGHTS`` as open_clip knows it; loaded once.
    cut : 0 for windows; the authors' program has 0.1. Each cut is four pictures for CLIP, 14 cuts to a quarter of the area,
        for which there are nine windows.

    Paper and program: the paper shows the region beside the whole picture; here it is shown alone. The program cuts 20 times,
    to 12 % of the area, in whole pixels rounded down. Windows are the default here: for 40 drawn things, four a picture, the
    small CLIP model found at least three quarters of 39 things in windows of a quarter of the area, and of 16 with the paper's
    cuts. All frames of a clip show one region, chosen by the mean over 4 of them.
    """

    name = "clip-crop"
    summary = "the region of a picture most like the question, by CLIP"
    paper = "arXiv 2310.16033"
    needs_question = True
    limits = {"cut": "[0, 0.5]"}

    query: str = ""
    clip_model: str | None = None
    cut: float = 0.0

    def picture(self, image: PILImage, retain: float) -> PILImage:
        if retain >= 1:
            return image
        return image.crop(self.region(np.asarray(image.convert("RGB"))[None], retain))

    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T, H, W, 3]`` uint8 -> ``[T, H', W', 3]``."""
        if retain >= 1 or not len(frames):
            return frames
        seen = frames[middles(len(frames), min(_LOOKED, len(frames)))]
        left, top, right, bottom = self.region(seen, retain)
        return np.ascontiguousarray(frames[:, top:bottom, left:right])

    def region(self, frames: np.ndarray, retain: float) -> Box:
        """The region of ``frames [T, H, W, 3]`` with ``retain`` of the area; no side is cut below the shortest."""
        if self.clip_model is None or not self.query.strip():
            raise UnsupportedError(
                "clip-crop needs a question and a CLIP model; give query='What ...?' and clip_model='FOLDER' of open_clip."
            )
        encoder = FrameEncoder.load(self.clip_model)
        asked, (height, width) = encoder.text(self.query), frames.shape[1:3]

        def best(regions: list[Box]) -> Box:
            shown = [frame[top:bottom, left:right] for left, top, right, bottom in regions for frame in frames]
            likeness = (encoder.frames(shown) @ asked).reshape(len(regions), len(frames)).mean(1)
            return regions[int(likeness.argmax())]

        if not self.cut:
            return best(windows(shrunk((width, height), retain), (width, height)))
        box: Box = (0, 0, width, height)
        while regions := smaller(box, retain * width * height, self.cut):
            box = best(regions)
        return box


def windows(size: tuple[int, int], whole: tuple[int, int]) -> list[Box]:
    """Windows of that ``size`` (width, height) all over the ``whole``, row by row."""
    places = []
    for side, room in zip(size, (whole[0] - size[0], whole[1] - size[1]), strict=True):
        steps = max(1, math.ceil(2 * room / side)) if room > 0 else 0
        places.append([round(at * room / max(1, steps)) for at in range(steps + 1)])
    return [(left, top, left + size[0], top + size[1]) for top in places[1] for left in places[0]]


def smaller(box: Box, area: float, cut: float) -> list[Box]:
    """The regions that are left of ``box`` after a cut below, above, on the right or on the left; none smaller than the
    ``area``, or with a side below the shortest."""
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    share = min(cut, 1 - area / (width * height))
    across, down = (int(share * side + 0.5) for side in (width, height))
    regions: list[Box] = []
    if down and height - down >= SHORTEST:
        regions += [(left, top, right, bottom - down), (left, top + down, right, bottom)]
    if across and width - across >= SHORTEST:
        regions += [(left, top, right - across, bottom), (left + across, top, right, bottom)]
    return regions
