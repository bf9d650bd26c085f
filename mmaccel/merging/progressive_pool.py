"""Progressive pooling: the first frame of every group is pooled lightly, the others strongly."""

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import group_sizes
from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .pool import pool_by


@register
class ProgressivePool(ProjectorMethod):
    """Frames in groups, of which the first shows detail and the others what changes.

    *Visual Context Window Extension: A New Perspective for Long Video Understanding*, arXiv 2409.20018; its pooling. (Its
    positions are ``visual-context-window``.)

    In every ``group`` of frames the first has ``detail`` times as many tokens as each of the others, as far as the budget and
    whole windows allow: every frame is average-pooled by itself into the windows that ``pool`` would choose for its share. What
    whole windows leave over is not used (``at_most``); a budget below a token a frame drops frames. An image is a group of
    its own, and so are its tiles. Newlines are dropped.

    Parameters
    ----------
    group : frames a group; 4, which is our choice.
    detail : 4, as with strides of 2 for the first frame and 4 for the others, which is our choice too.

    Paper and program: no program is public. The paper pools with two strides; here the budget decides the windows.
    """

    name = "progressive-pool"
    summary = "first frame of every group pooled lightly, the others strongly"
    paper = "arXiv 2409.20018"
    unit = "picture"
    budget = "at_most"
    limits = {"group": "[1, inf)", "detail": "[1, inf)"}

    group: int = 4
    detail: int = 4

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``cells [N, n, 3]``, ``count [N]`` -> windows of every frame, averaged."""
        frame, film = frame_numbers(tokens), tokens.grid[:, 0] > 1
        sizes = group_sizes(frame, max(1, int(frame.max()) + 1))
        first = (torch.arange(sizes.shape[1], device=sizes.device) % self.group == 0) | ~film[:, None].to(sizes.device)
        share = sizes * torch.where(first, self.detail, 1)
        rows = zip(count.tolist(), sizes.tolist(), share.tolist(), strict=True)
        kept = [apportion(k, size, weight) for k, size, weight in rows]
        return pool_by(tokens, frame, torch.tensor(kept, device=sizes.device).view_as(sizes), count)
