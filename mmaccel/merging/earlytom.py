"""EarlyTom's choice behind the vision tower: frames at the ends of a segment by attention, inner ones evenly by windows."""

import math

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import Grid, ProjectorMethod, Tap, TokenBatch, register
from ..method.steady_segments import steady_segments
from .film import Clip, Flat, by_clip, themselves


@register
class EarlyTomTokens(ProjectorMethod):
    """Keep what the tower looks at: the best tokens of the frames at the ends of a segment, the best of every window of others.

    *EarlyTom*, a method for LLaVA-OneVision; its part behind the tower. ``earlytom-frames`` merges frames inside it; the
    recipe ``earlytom`` has both.

    1. A clip is cut into segments of frames that stay like their first, by the hidden states of a tower layer
       (:func:`~mmaccel.method.steady_segments.steady_segments`).
    2. Let ``r`` be the share of the tokens left that may stay. The first and the last frame of a segment keep the ``ceil(n r)``
       of their ``n`` tokens that receive most attention in that layer.
    3. An inner frame is cut into ``max(1, round(n r))`` runs of tokens, the first ones longer by one where they do not come out
       even, and keeps the most attended of each (the first on a tie).

    The budget is met up to rounding, as in the paper; newlines are dropped. A picture is one frame.

    ``variant="official"``: the number of tokens that may stay is rounded up.

    Parameters
    ----------
    tau, longest, ema : as in ``earlytom-frames``.
    layer : int or float; the tower layer whose hidden states cut the clip and whose attention ranks tokens, or its share of the
        depth; 23 of 26, the last layer of ``earlytom-frames``.

    Paper and program: the program compares frames patch by patch, here tokens as the language model gets them. A share of
    tokens that are clusters raises an error in the program, and is 0 in its scripts; it is not offered. With newlines in a grid
    the program appends one to every token and loses frames.
    """

    name = "earlytom-tokens"
    summary = "most attended tokens of frames at the ends of a segment, and of windows of the frames between them"
    paper = "github.com/viridisGreen/EarlyTom"
    unit = "picture"
    budget = "adaptive"
    limits = {"tau": "[-1, 1]", "longest": "[2, inf)", "ema": "(0, 1]"}

    tau: float = 0.6
    longest: int = 8
    ema: float = 0.9
    layer: float = 23 / 26

    def taps(self) -> tuple[Tap, ...]:
        return Tap("received_attention", (self.layer,)), Tap("features", (self.layer,))

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The share ``retain`` rounded up; the program does not round it."""
        return math.ceil(round(retain * size, 6))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``received_attention [N, 1, n]``, ``features [N, 1, n, C]`` of the tower, ``count [N]`` -> links of every clip."""
        attention, states = (tokens.signals[name].float()[:, 0] for name in ("received_attention", "features"))

        def links(clip: Clip) -> Flat:
            left = clip.valid.any(1)
            frames = left.nonzero()[:, 0]
            slots, valid = clip.slots[left], clip.valid[left]
            seen = attention[clip.row, slots].masked_fill(~valid, -torch.inf)
            # frames are compared at the places where all have a token
            shared = valid.all(0) if bool(valid.all(0).any()) else valid.any(0)
            here = states[clip.row, slots].masked_fill(~valid[..., None], 0.0)[:, shared]
            kept = self.choose(seen, valid, clip.count / clip.cells, self.segments(here))
            at = kept.nonzero()
            return themselves(frames[at[:, 0]] * clip.slots.shape[1] + at[:, 1])

        return by_clip(tokens, count, links)

    def segments(self, states: Tensor) -> list[tuple[int, int]]:
        """First and last frame of the segments of ``states [T, P, C]``."""
        return steady_segments(states, self.tau, self.ema, self.longest)

    def choose(self, attention: Tensor, valid: Tensor, share: float, segments: list[tuple[int, int]]) -> Tensor:
        """``[T, P]`` bool: what stays of cells ``valid [T, P]`` with ``attention [T, P]``, -inf elsewhere."""
        kept = torch.zeros_like(valid)
        ends = {frame for segment in segments for frame in segment}
        for frame, places in enumerate(valid.sum(1).tolist()):
            # rounded first, so that every machine rounds alike
            wanted = round(places * min(share, 1.0), 6)
            slots = valid[frame].nonzero()[:, 0]
            seen = attention[frame, slots]
            if frame in ends:
                best = seen.argsort(descending=True, stable=True)[: math.ceil(wanted)]
            else:
                runs = torch.arange(places, device=slots.device).tensor_split(min(places, max(1, round(wanted))))
                best = torch.stack([run[seen[run].argmax()] for run in runs])
            kept[frame, slots[best]] = True
        return kept
