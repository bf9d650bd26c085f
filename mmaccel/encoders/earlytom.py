"""EarlyTom's merging of frames inside the vision tower."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..method import FrameMergingMethod, register
from ..method.steady_segments import frame_likeness, steady_segments


@register
class EarlyTomFrames(FrameMergingMethod):
    """Merge neighbouring frames behind a few layers of the tower, so that later layers encode fewer.

    *EarlyTom*, a method for LLaVA-OneVision; its part inside the tower. ``earlytom-tokens`` chooses from the tokens of the
    frames that are left; the recipe ``earlytom`` has both.

    1. A clip is cut into segments of frames that stay like their first
       (:func:`~mmaccel.method.steady_segments.steady_segments`).
    2. The first and the last frame of a segment stay, and so does a single frame between them. Of more inner frames let ``s_i``
       be the mean cosine of ``i`` and ``i + 1`` at the same places, and ``t`` that of the first and the last. One after the
       other, ``i`` and ``i + 1`` merge where ``s_i > t`` and ``s_i > s_(i + 1)``, with weights ``s_i / (s_i + s_(i + 1))`` and
       the rest; else ``i`` stays.

    ``variant="official"``: the last inner frame is dropped, unless it is the second of two that merge; of the last pair, which
    has no ``s_(i + 1)``, the second is dropped.

    Parameters
    ----------
    tau : float from -1 to 1; likeness below which a segment ends; 0.6 as the default of the authors' class. Their scripts have
        0.3 to 0.8, by benchmark and budget.
    longest : int, at least 2; the frame that ends a segment, counted from 1, so a segment has one less; 8 as in the class.
    ema : float above 0 to 1; weight of the newest frame in the running mean of the likeness; 0.9 as in the scripts.
    mixing : ``"pairs"`` as above, ``"mean"``: all inner frames of a segment become their mean.
    layers : tuple of int or float, not empty; layers or shares of the depth; 6, 21 and 23 of 26 as in the class.

    Of 20 questions about clips ``mini-qwen-vl`` gave 90 % of the bare model's answers with 70 % of the tokens (68 to 99). The
    recipe ``earlytom`` gave 85 % with an eighth, as many as ``holitom`` (62 to 97; ``mmaccel eval --suite video --limit 4``).

    Paper and program: the last pair of inner frames merges with equal weights here.
    """

    name = "earlytom-frames"
    summary = "neighbouring frames like each other merge between layers of the vision tower"
    paper = "github.com/viridisGreen/EarlyTom"
    limits = {"tau": "[-1, 1]", "longest": "[2, inf)", "ema": "(0, 1]", "layers": "not empty"}

    tau: float = 0.6
    longest: int = 8
    ema: float = 0.9
    mixing: Literal["pairs", "mean"] = "pairs"
    layers: tuple[float, ...] = (6 / 26, 21 / 26, 23 / 26)

    def depths(self) -> Sequence[float]:
        return self.layers

    def merge(self, frames: Tensor) -> Tensor:
        """``[T, P, C] -> [T', T]``."""
        rows: list[dict[int, float]] = []
        for first, last in steady_segments(frames, self.tau, self.ema, self.longest):
            inner = list(range(first + 1, last))
            rows.append({first: 1.0})
            if self.mixing == "mean" and inner:
                rows.append({frame: 1 / len(inner) for frame in inner})
            elif len(inner) > 1:
                rows += self._pairs(frames, first, last)
            else:
                rows += [{frame: 1.0} for frame in inner]
            if last > first:
                rows.append({last: 1.0})
        weights = torch.zeros(len(rows), len(frames))
        for row, sources in enumerate(rows):
            for frame, weight in sources.items():
                weights[row, frame] = weight
        return weights.to(frames.device)

    def _pairs(self, frames: Tensor, first: int, last: int) -> list[dict[int, float]]:
        """Weights of the frames that the inner ones of the segment from ``first`` to ``last`` merge into, row by row."""
        least = frame_likeness(frames[first], frames[last])
        like = {i: frame_likeness(frames[i], frames[i + 1]) for i in range(first + 1, last - 1)}
        rows, frame = list[dict[int, float]](), first + 1
        while frame < last:
            following = like.get(frame + 1)
            if frame in like and like[frame] > least and (following is None or like[frame] > following):
                if following is None:
                    weight = 1.0 if self.official else 0.5
                else:
                    # cosines of opposite frames are no weights
                    mine, other = max(like[frame], 1e-6), max(following, 0.0)
                    weight = mine / (mine + other)
                rows.append({frame: weight, frame + 1: 1 - weight})
                frame += 2
                continue
            if frame + 1 < last or not self.official:
                rows.append({frame: 1.0})
            frame += 1
        return rows
