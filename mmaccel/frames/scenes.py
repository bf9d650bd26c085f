"""Scene frames: cuts found on pixels, and frames from every scene."""

import numpy as np

from ..method import FrameChoice, register
from .distinct import thumbnails
from .uniform import middles

#: the longest way around PIL's circle of hues
_HALF_TURN = 128.0


@register
class SceneFrames(FrameChoice):
    """Frames spread over scenes: each scene shows at least one, long ones more.

    A scene ends where neighbouring frames differ: the mean over pixels of what hue, saturation and value differ in
    thumbnails (32 x 32), from 0 to 255. If there are more cuts than the budget has frames for, the strongest count, and
    the earlier of equal ones. Without cuts the frames are evenly spaced.

    Parameters
    ----------
    threshold : the difference that is a cut. The default 27 is what PySceneDetect advises for its detector of cuts
        (``detect-content``), which measures full-size frames; hues are compared around their circle here.
    """

    name = "scene-frames"
    summary = "frames from every scene, by changes of colour (cheap)"
    limits = {"threshold": "(0, 255]"}

    threshold: float = 27.0

    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        """``frames [T, H, W, 3]`` -> ``[count]``."""
        change = np.abs(np.diff(thumbnails(frames, "HSV"), axis=0))
        change[..., 0] = np.minimum(change[..., 0], 2 * _HALF_TURN - change[..., 0])
        strength = change.mean((1, 2, 3))
        cuts = np.flatnonzero(strength > self.threshold)
        strongest = cuts[np.argsort(-strength[cuts], kind="stable")[: count - 1]]
        return over_scenes(between(strongest, len(frames)), count)


def between(ends: np.ndarray, total: int) -> list[tuple[int, int]]:
    """First and last frame of every scene, when scenes end at the frames ``ends`` and with the last of ``total``."""
    last = sorted({*ends.tolist(), total - 1})
    return list(zip([0, *(end + 1 for end in last[:-1])], last, strict=True))


def over_scenes(scenes: list[tuple[int, int]], count: int) -> np.ndarray:
    """``count`` frames spread over scenes, ascending: one each, the others by length, all in the middle of their stretch.

    scenes : first and last frame of each, without gaps; at most ``count``.
    """
    lengths = np.asarray([last - first + 1 for first, last in scenes])
    shares = np.ones(len(scenes), dtype=np.int64)
    for _ in range(count - len(scenes)):
        # where a frame now represents most others; the earlier scene on a tie
        shares[np.argmax(np.where(shares < lengths, lengths / shares, 0))] += 1
    parts = zip(scenes, lengths.tolist(), shares.tolist(), strict=True)
    return np.concatenate([first + middles(length, share) for (first, _), length, share in parts])
