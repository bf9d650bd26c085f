"""StreamVLN: the newest frames stay as they are, and a few pooled ones represent the past."""

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import group_sizes
from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .pool import pool_by


@register
class StreamVln(ProjectorMethod):
    """Fast tokens of now, slow tokens of before.

    *StreamVLN: Streaming Vision-and-Language Navigation via SlowFast Context Modeling*, arXiv 2507.05240; its context, without
    training and without depth.

    The last ``recent`` frames are the present: they stay whole as far as the budget goes. Of all before, ``history`` frames
    at equal strides from the first on are the memory; what the budget has left is shared evenly among them, and each is
    average-pooled into the windows that ``pool`` would choose. The other frames are dropped. What whole windows leave over
    is not used (``at_most``). An image is the present, and so are its tiles. Newlines are dropped.

    Parameters
    ----------
    recent : frames of the present; 1, the current one, as in the program.
    history : frames of the memory; 8 as in the program.

    Paper and program: the paper drops what depth and pose show to be the same place, which the program does not use. The
    program pools frames of the memory 2x2; here the budget decides the windows. Its window of 32 steps with a cache is a
    matter of the dialogue around the model. The model was trained with it.
    """

    name = "streamvln"
    summary = "newest frames whole, a few pooled ones of the past"
    paper = "arXiv 2507.05240"
    unit = "picture"
    budget = "at_most"
    limits = {"recent": "[1, inf)", "history": "[0, inf)"}

    recent: int = 1
    history: int = 8

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``cells [N, n, 3]``, ``count [N]`` -> the newest frames, and windows of those before."""
        frame = frame_numbers(tokens)
        sizes = group_sizes(frame, max(1, int(frame.max()) + 1))
        films = (tokens.grid[:, 0] > 1).tolist()
        rows = zip(count.tolist(), sizes.tolist(), films, strict=True)
        kept = torch.tensor([self._shares(*row) for row in rows], device=sizes.device).view_as(sizes)
        return pool_by(tokens, frame, kept, count)

    def _shares(self, count: int, sizes: list[int], film: bool) -> list[int]:
        """How many tokens each frame of one unit may keep."""
        frames = sum(size > 0 for size in sizes)
        past = max(0, frames - self.recent) if film else 0
        now = [size if i >= past else 0 for i, size in enumerate(sizes)]
        out = apportion(count, now)
        stride = max(1, past // self.history) if self.history else past + 1
        slow = list(range(0, past, stride))[: self.history]
        for f, kept in zip(slow, apportion(count - sum(out), [sizes[f] for f in slow]), strict=True):
            out[f] = kept
        return out
