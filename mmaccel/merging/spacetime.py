"""Tokens that differ from their neighbours in space and in time."""

import torch
from mmaccel_kernels.maxmin import max_min
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import group_sizes
from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import cosine_to
from .film import Film, equal_parts

#: distances below this are rounding, and count as zero: exact copies then tie on every machine
_NOISE = 1e-6
#: how much longer than the longest token the radius of the sphere is on which tokens are compared
_RADIUS = 2.0


@register
class SpaceTime(ProjectorMethod):
    """Max-min diversity within every frame, of what changes from frame to frame.

    A rule of mmaccel; no paper. A token is worth the smaller of two distances: to the nearest token of its own frame that was
    picked before it, and ``change`` times the larger of those to the same cell one frame before and one frame after. The
    token of most worth is picked until ``count`` are, the lower slot on a tie. A cell that no frame showed before has no
    second distance; in a picture, or a frame of such cells, the token whose nearest neighbour is farthest comes first. So
    static cells are kept once, in the first frame, and both sides of a change stay. A pick changes nothing in other frames, so
    the frames of all clips are picked from at once.

    Distances are nearly squared Euclidean: one more coordinate lays the tokens of a picture or clip on a sphere of twice the
    length of the longest one, where ``1 - cos`` is taken. So the length of a token counts, which it does not in ``divprune``
    (arXiv 2503.02175). The temporal half compares as ``evs`` (arXiv 2510.14624) does, but does not take the whole first frame.

    Tiles and newlines of a picture are picked from together. In clips newlines are dropped first. Where an earlier stage
    dropped a cell, the latest frame before that has it is compared. A clip whose camera moves changes everywhere; then every
    frame gets diverse tokens.

    Parameters
    ----------
    change : how much more a change counts than a difference within a frame. From 1 to 8 the answers about clips are the
        same but for chance.
    """

    name = "spacetime"
    summary = "tokens that are far from others of their frame, where the clip changes"
    unit = "picture"
    default_retain = 0.25
    limits = {"change": "(0, inf)"}

    change: float = 4.0

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the picked slots."""
        return Reduction.top(self.worth(tokens, count), tokens.valid, count.to(tokens.valid.device))

    def worth(self, tokens: TokenBatch, count: Tensor) -> Tensor:
        """``[N, n]`` float32: what each token was worth when it was picked, infinity for the first of a frame that none is
        before; minus infinity for what is not among the first ``count [N]`` of its frame, and for newlines of clips."""
        valid, count = tokens.valid, count.to(tokens.valid.device)
        frames = tokens.grid[:, :1].to(valid.device)
        moving = frames > 1
        part = torch.where(moving, tokens.cells[..., 0].masked_fill(~tokens.celled, -1), valid.long() - 1)
        sizes = group_sizes(part, int(frames.max()))
        x = lifted(tokens.features, valid)
        limit = self.limit(tokens, x).masked_fill(~moving, torch.inf)
        far = torch.full(valid.shape, -torch.inf, device=valid.device)
        for rows, slots, most in equal_parts(part, torch.minimum(sizes, count[:, None])):
            every = torch.ones(slots.shape, dtype=torch.bool, device=valid.device)
            wanted = torch.full_like(slots[:, 0], most)
            far[rows, slots] = max_min(x[rows, slots], every, wanted, _NOISE, most, limit[rows, slots])
        return far

    def limit(self, tokens: TokenBatch, x: Tensor) -> Tensor:
        """``[N, n]`` float32: the distance of each token to the same cell in the frames beside it, infinite in the first; ``x``
        as :func:`lifted` returns them."""
        before = Film.of(tokens).earlier()
        away = 1.0 - cosine_to(x, before)
        away = away.masked_fill(away < _NOISE, 0.0)
        most = away.scatter_reduce(1, before.clamp(min=0), away.masked_fill(before < 0, 0.0), "amax")
        return (self.change * most).masked_fill(before < 0, torch.inf)


def lifted(features: Tensor, valid: Tensor) -> Tensor:
    """``[N, n, D + 1]`` float32 unit vectors: ``features [N, n, D]`` on a sphere around those that are valid."""
    x = features.float().masked_fill(~valid[..., None], 0.0)
    square = (x * x).sum(-1, keepdim=True)
    radius = _RADIUS**2 * square.amax(1, keepdim=True)
    return normalize(torch.cat([x, (radius - square).sqrt()], -1), dim=-1)
