"""Query frames: those that CLIP finds most like the question."""

import numpy as np

from ..errors import UnsupportedError
from ..method import FrameChoice, register
from .clip import FrameEncoder


@register
class QueryFrames(FrameChoice):
    """The frames whose CLIP embedding has the highest cosine with that of the question; the earlier on a tie.

    Parameters
    ----------
    query : the question, or better what it is about: CLIP knows captions. A processor is prepared for each question,
        ``prepare(processor, "query-frames", query=question, clip_model=...)``, which costs nothing.
    clip_model : a folder of an open_clip model, or ``NAME:WEIGHTS`` as open_clip knows it; loaded once.
    """

    name = "query-frames"
    summary = "frames most like the question, by CLIP"
    needs_question = True

    query: str = ""
    clip_model: str | None = None

    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        """``frames [T, H, W, 3]`` -> ``[count]``."""
        if self.clip_model is None or not self.query.strip():
            raise UnsupportedError(
                "query-frames needs a question and a CLIP model; give query='What ...?' and clip_model='FOLDER' of open_clip."
            )
        encoder = FrameEncoder.load(self.clip_model)
        relevance = encoder.frames(frames) @ encoder.text(self.query)
        return np.sort(np.argsort(-relevance, kind="stable")[:count])
