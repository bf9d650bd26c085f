"""KiToke: tokens of which the whole clip has few, and the others merged into them within intervals of time."""

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction, segment_sum
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import BLOCK, cosine_of, frame_numbers
from .film import newline_targets

#: what is left of the worth of a token whose copy was picked; nearer tokens differ by little more than rounding
_LEAST = 1e-4


@register
class KiToke(ProjectorMethod):
    """Diversity over the whole clip by a kernel, and merging within intervals.

    *KiToke: Kernel-based Interval-aware Token Compression for Video Large Language Models*, arXiv 2604.03414.

    With unit vectors ``x_i`` and ``k_ij = exp(-|x_i - x_j|^2 / (2 s^2))`` the redundancy of a token is ``mean_j k_ij`` over all
    tokens of the clip, and its diversity ``d_i`` the inverse of that. Tokens are picked one by one, each the one of most worth
    (the lower slot on a tie). Worth begins as diversity, and every pick ``i`` multiplies that of ``j`` by ``1 - k_ij``, so that
    what is like a pick is not picked too.

    The clip is cut into intervals where the cosine of the mean tokens of neighbouring frames is below the mean of those
    cosines by more than their standard deviation. A token that was not picked joins the pick of its interval that it is most
    alike to, or of the clip where the interval has none, and what comes together is averaged with the weights ``d``.

    A picture is one interval, with all its tiles. Tokens without a cell (newlines) are dropped first.

    Parameters
    ----------
    bandwidth : ``s``, as a multiple of the root mean square distance of two tokens of the clip.

    Paper and program: no program is public, and this was written from the paper's abstract. Diversity by a kernel over the
    whole clip, intervals that cost little, and merging within them are the paper's; all formulas and constants are ours, and
    figures of the paper are not to be expected.
    """

    name = "kitoke"
    summary = "tokens that are rare in the whole clip, the others merged into them within intervals"
    paper = "arXiv 2604.03414"
    unit = "picture"
    conserves_mass = True
    limits = {"bandwidth": "(0, inf)"}

    bandwidth: float = 1.0

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the pick that each token flows into."""
        here, count, target = newline_targets(tokens, count)
        weight, number = torch.ones(here.shape, device=here.device), frame_numbers(tokens)
        rows = zip(count.tolist(), here.sum(1).tolist(), tokens.grid[:, 0].tolist(), strict=True)
        for row, (wanted, size, frames) in enumerate(rows):
            slots = here[row].nonzero()[:, 0]
            if wanted >= size:
                target[row, slots] = slots
            elif wanted:
                x = tokens.features[row, slots].float()
                picked, diversity = self.pick(x, wanted)
                part = intervals(x, number[row, slots]) if frames > 1 else torch.zeros_like(slots)
                target[row, slots] = slots[joined(x, part, picked)]
                weight[row, slots] = diversity
        return Reduction.merge(target, tokens.valid, weight)

    def pick(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """``[n]`` bool, ``count`` tokens of ``x [n, D]`` that are picked, and ``[n]`` float32, the diversity of all."""
        size, x = len(x), normalize(x, dim=-1)
        copies, own = first_copies(x[None]), torch.arange(size, device=x.device)
        first = own if copies is None else copies[0]
        # the mean square of distances is twice this; all of them are zero where it is
        spread = (self.bandwidth**2 * (1 - x.mean(0).square().sum()) * 2).clamp(min=torch.finfo(x.dtype).tiny)

        def kernel(at: Tensor) -> Tensor:
            # [a, n] of the tokens at [a] and all, the same for all copies
            near = (x[first[at]] @ x.T)[:, first].clamp(max=1.0)
            return ((near.masked_fill(first[at][:, None] == first, 1.0) - 1) / spread).exp()

        blocks = own.split(max(1, BLOCK // size))
        table = kernel(own) if len(blocks) == 1 else None
        redundancy = torch.cat([kernel(block).mean(1) for block in blocks]) if table is None else table.mean(1)
        diversity = 1 / redundancy[first]
        worth, picked = diversity.log(), torch.zeros_like(first, dtype=torch.bool)
        for _ in range(count):
            at = worth.argmax(0, keepdim=True)
            picked = picked.index_fill(0, at, True)
            near = kernel(at) if table is None else table[at]
            worth = (worth + (1 - near[0]).clamp(min=_LEAST).log()).masked_fill(picked, -torch.inf)
        return picked, diversity


def intervals(x: Tensor, frame: Tensor) -> Tensor:
    """``[n]`` long: the interval of every token of ``x [n, D]``, which are of ``frame [n]`` in order."""
    sizes = torch.bincount(frame)
    means = segment_sum(x, sizes) / sizes[:, None]
    cosine = cosine_of(means[:-1], means[1:])
    away = cosine - cosine.mean()
    cut = away < -away.square().mean().sqrt()
    return torch.cat([cut.new_zeros(1), cut]).cumsum(0)[frame]


def joined(x: Tensor, part: Tensor, picked: Tensor) -> Tensor:
    """``[n]`` long: the token that each of ``x [n, D]`` flows into: itself if ``picked [n]``, else the one of these that is
    most alike, of its ``part [n]`` if that has one."""
    into = torch.arange(len(x), device=x.device)
    x = normalize(x, dim=-1)[None]
    first = first_copies(x)
    for number in part.unique().tolist():
        mine = part == number
        others = (mine & ~picked).nonzero()[:, 0]
        with_pick = mine & picked
        picks = (with_pick if bool(with_pick.any()) else picked).nonzero()[:, 0]
        into[others] = picks[most_alike(x, others[None], picks[None], first=first)[1][0]]
    return into
