"""V-CAST: frames where the path of a clip bends keep more tokens, and of a frame those unlike its mean."""

import torch
from mmaccel_kernels.copies import of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import group_sizes, top_in_groups
from ..core.reduction import Reduction
from ..method import Grid, ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .film import spare_newlines
from .vidcom2 import copies_in, part_means

_LEAST = 1e-6


@register
class VCAST(ProjectorMethod):
    """Budgets of frames by curvature, tokens by distance from the frame's mean and by length; nothing is merged.

    *V-CAST*, 2026.

    With ``r_t`` the direction of the mean token of frame ``t``, its curvature is ``1 - cos(r_t - r_{t-1}, r_{t+1} - r_t)``, 1
    for the first and the last. A frame keeps ``least`` tokens and its share of the rest, ``softmax(curvature / temperature)``,
    rounded down; what that leaves over goes to the frames of largest fraction, one each. In a frame the tokens of largest ``1
    - cos(x, r_t)`` plus length, moved to [0, 1] over the frame, stay.

    ``variant="official"``: what is left over goes to the frame of largest fraction until it is full, clips of one step in time
    stay whole, and a ratio is rounded half to even.

    Parameters
    ----------
    temperature : of the softmax over frames, 0.7.
    least : tokens of every frame, 1; fewer where the budget does not have that many.

    Paper and program: tiles of a picture count as frames, where the program leaves pictures alone. Newlines are dropped first.
    """

    name = "vcast"
    summary = "tokens unlike their frame's mean; frames where the clip turns keep more"
    paper = "github.com/xinyouu/V-CAST"
    unit = "picture"
    official_rounding = "half even"
    default_retain = 0.25
    limits = {"temperature": "(0, inf)", "least": "[0, inf)"}

    temperature: float = 0.7
    least: int = 1

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Rounded half to even; clips of one step stay whole."""
        return size if grid is not None and grid[0] == 1 else super().official_count(retain, size, grid)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the tokens of every frame."""
        here, part = tokens.celled, frame_numbers(tokens)
        groups = max(1, int(part.max()) + 1) if part.numel() else 1
        x = tokens.features.float().masked_fill(~here[..., None], 0.0)
        sizes = group_sizes(part, groups)
        path = normalize(part_means(x, part, groups), dim=-1)
        rows = zip(count.tolist(), path, sizes.tolist(), strict=True)
        shares = torch.tensor([self.shared(k, r, each) for k, r, each in rows], device=part.device).view_as(sizes)
        mine = path.gather(1, part.clamp(min=0)[..., None].expand_as(x))
        length = x.norm(dim=-1)
        onto = torch.where(part < 0, groups, part)
        bounds = (
            length.new_zeros(len(x), groups + 1).scatter_reduce(1, onto, length, how, include_self=False)
            for how in ("amin", "amax")
        )
        low, high = (one.gather(1, onto) for one in bounds)
        score = 1 - (normalize(x, dim=-1) * mine).sum(-1) + (length - low) / (high - low + _LEAST)
        kept = top_in_groups(of_first(score, copies_in(x, part)), part, shares)
        return Reduction(kept | spare_newlines(tokens, count), tokens.valid)

    def shared(self, count: int, path: Tensor, sizes: list[int]) -> list[int]:
        """Number of ``count`` tokens that every frame keeps, of ``path [T, D]`` and ``sizes``."""
        frames = [i for i, size in enumerate(sizes) if size]
        count, given = min(count, sum(sizes)), [0] * len(sizes)
        if not frames or not count:
            return given
        weight = self.weights(path[torch.tensor(frames, device=path.device)])
        least = min(self.least, count // len(frames))
        for i in frames:
            given[i] = min(least, sizes[i])
        rest = weight * (count - sum(given))
        for i, more in zip(frames, rest.floor().long().tolist(), strict=True):
            given[i] += min(more, sizes[i] - given[i])
        order = [frames[i] for i in (rest - rest.floor()).argsort(descending=True, stable=True).tolist()]
        while left := count - sum(given):
            for i in [i for i in order if given[i] < sizes[i]]:
                more = min(left, sizes[i] - given[i] if self.official else 1)
                given[i] += more
                left -= more
                if not left:
                    break
        return given

    def curvature(self, path: Tensor) -> Tensor:
        """``[T]``: how much the ``path [T, D]`` bends at every frame."""
        steps = path.diff(dim=0)
        bend = path.new_ones(len(path))
        if len(steps) > 1:
            bend[1:-1] = 1 - torch.cosine_similarity(steps[:-1], steps[1:], dim=-1)
        return bend

    def weights(self, path: Tensor) -> Tensor:
        """``[T]``: the share of every frame."""
        return (self.curvature(path) / self.temperature).softmax(0)
