"""Segments of a clip whose frames stay like their first, as EarlyTom cuts them."""

import torch
from torch import Tensor


def frame_likeness(one: Tensor, other: Tensor) -> float:
    """Mean cosine of the tokens at the same places of two frames ``[P, D]``."""
    return float(torch.cosine_similarity(one.float(), other.float(), dim=-1).mean())


def steady_segments(frames: Tensor, tau: float, ema: float, longest: int) -> list[tuple[int, int]]:
    """First and last frame of EarlyTom's segments of ``frames [T, P, D]``: as long as frames stay like the first.

    With ``c`` the mean cosine of a frame's tokens with those at the same places of the segment's first frame, a running mean
    ``v = ema c + (1 - ema) v`` begins at 1 in every segment. A segment ends before the frame at which ``v < tau``, or which
    would be its ``longest``-th.
    """
    out, start, mean = [], 0, 1.0
    for frame in range(1, len(frames)):
        mean = ema * frame_likeness(frames[start], frames[frame]) + (1 - ema) * mean
        if mean < tau or frame - start + 1 >= longest:
            out.append((start, frame - 1))
            start, mean = frame, 1.0
    return [*out, (start, len(frames) - 1)] if len(frames) else []
