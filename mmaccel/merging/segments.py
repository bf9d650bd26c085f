"""Cutting a clip into segments of consecutive frames."""

import numpy as np
import torch
from torch import Tensor

from ..core.masks import suffix_sums


def static_segments(similar: Tensor, longest: int = 1024) -> tuple[list[tuple[int, int]], int]:
    """The segments that save most tokens when cells that do not change within a segment are kept once.

    Dynamic programming of HoliTom: a segment of frames ``s .. e`` saves ``(e - s)`` times the number of cells at which all its
    neighbouring frames are similar, and the sum over segments is maximised. On a tie the last segment is the shortest.

    similar : ``[T - 1, P]`` bool, whether frames t and t + 1 are similar at each cell.
    longest : the most frames of a segment.

    Returns first and last frame of every segment, and the number of tokens they save.
    """
    frames, places = similar.shape[0] + 1, similar.shape[1]
    # for how many frames each cell has not changed
    run = torch.zeros(frames, places, dtype=torch.long, device=similar.device)
    for t in range(1, frames):
        run[t] = (run[t - 1] + 1) * similar[t - 1]
    ends = torch.zeros(frames, frames, dtype=torch.long, device=similar.device)
    ends.scatter_add_(1, run, torch.ones_like(run))
    # still[e, w]: number of cells that have not changed in the last w steps up to frame e
    still = suffix_sums(ends).cpu().numpy()

    best = np.zeros(frames + 1, dtype=np.int64)
    width = np.ones(frames, dtype=np.int64)
    for e in range(frames):
        steps = np.arange(0, min(e + 1, longest))
        gain = best[e - steps] + still[e, steps] * steps
        # argmax returns the first, which is the shortest segment
        width[e] = int(gain.argmax()) + 1
        best[e + 1] = gain.max()
    out = []
    e = frames - 1
    while e >= 0:
        out.append((int(e - width[e] + 1), e))
        e -= int(width[e])
    return out[::-1], int(best[-1])


def changing_segments(frames: Tensor, cuts: int, tau: float) -> list[tuple[int, int]]:
    """First and last frame of the segments of ``frames [T, D]``.

    Segments end after the ``cuts`` frames of lowest cosine with the next one (the earlier on a tie), and after every frame
    whose cosine with the next one is below ``tau``.
    """
    cosine = torch.cosine_similarity(frames[:-1].float(), frames[1:].float(), dim=-1)
    ends = cosine < tau
    ends[cosine.argsort(stable=True)[:cuts]] = True
    last = [*ends.nonzero()[:, 0].tolist(), len(frames) - 1]
    return list(zip([0, *(end + 1 for end in last[:-1])], last, strict=True))
