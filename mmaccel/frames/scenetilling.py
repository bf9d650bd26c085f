"""SceneTilling: scenes by the valleys of similarity between neighbouring frames, as a vision encoder sees them."""

import numpy as np

from ..errors import UnsupportedError
from ..method import FrameChoice, register
from .clip import FrameEncoder
from .scenes import between, over_scenes

#: scenes that the threshold may find
_MOST = 15


@register
class SceneTilling(FrameChoice):
    """Frames spread over the scenes that VideoLLaMB finds: valleys of :func:`depths`, by the rule of :func:`boundaries`.

    The paper divides a clip to compress every scene in a memory; here each scene shows at least one frame, long ones more,
    all in the middle of their stretch. Frames are compared as CLIP embeds them, where the paper takes the states of its
    vision encoder.

    Parameters
    ----------
    clip_model : a folder of an open_clip model, or ``NAME:WEIGHTS`` as open_clip knows it.
    alpha : how many standard deviations above the mean a valley must be deep, as in the authors' program.
    """

    name = "scenetilling"
    summary = "frames from every scene, by valleys of CLIP similarity"
    paper = "arXiv 2409.01071"

    clip_model: str | None = None
    alpha: float = 0.5

    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        """``frames [T, H, W, 3]`` -> ``[count]``."""
        if self.clip_model is None:
            raise UnsupportedError(
                "scenetilling needs a CLIP model; give clip_model='FOLDER' of open_clip, or use scene-frames, which needs none."
            )
        features = FrameEncoder.load(self.clip_model).frames(frames)
        ends = boundaries(depths((features[:-1] * features[1:]).sum(1)), alpha=self.alpha, most=min(_MOST, count - 1))
        return over_scenes(between(ends, len(frames)), count)


def depths(similarity: np.ndarray) -> np.ndarray:
    """``[T - 1]``: how deep the valley at every pair of neighbouring frames is, from ``similarity [T - 1]``.

    ``left + right - 2 similarity``, where the peak on each side is found by climbing while the similarity does not fall.
    """

    def peaks(values: np.ndarray) -> np.ndarray:
        """The peak to the left of each."""
        peak = values.copy()
        for at in range(1, len(values)):
            if values[at - 1] >= values[at]:
                peak[at] = peak[at - 1]
        return peak

    out: np.ndarray = peaks(similarity) + peaks(similarity[::-1])[::-1] - 2 * similarity
    return out


def boundaries(depth: np.ndarray, alpha: float = 0.5, most: int = _MOST) -> np.ndarray:
    """The last frames of scenes, ascending, but for the last frame of all; from ``depth [T - 1]``.

    Those deeper than the mean plus ``alpha`` standard deviations (unbiased), the deepest ``most`` of them; the earlier on a
    tie.
    """
    deep = depth > depth.mean() + alpha * depth.std(ddof=1) if len(depth) > 1 else np.zeros(len(depth), dtype=bool)
    k = min(most, int(deep.sum()))
    return np.sort(np.argsort(-depth, kind="stable")[:k])
