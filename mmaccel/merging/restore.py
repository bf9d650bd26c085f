"""RESTORE, its reduction: half of the budget by another method, the other half by merging around distinctive anchors."""

from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies, of_first, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.density_peaks import centres
from ..method.registry import get_method


@register
class RestoreMerge(ProjectorMethod):
    """Merge what another method prunes into groups around anchors that are dense and unlike less dense tokens.

    *RESTORE*, ICML 2026.

    ``base`` keeps half of the budget, rounded down. Of the other tokens, with ``d_i`` the sum of the cosines of token ``i`` to
    all of them and ``u_i`` the largest cosine to one of smaller ``d`` (0 for the smallest), those of highest ``d_i (1 - u_i)``
    are anchors, as many as are left of the budget. Every other one joins the anchor of largest cosine, the lower slot on a tie.
    A group becomes its mean, at the place of its lower median member, so that no token is lost.

    Parameters
    ----------
    base : the method that keeps tokens; it reads nothing but what the language model would read.

    Paper and program: the program then gives every token its old share of attention in all layers, by the size of its group
    and by a factor of distance, which is not offered here; ``proportional="all"`` weighs tokens by what they represent. By its
    names the program compares with denser tokens; it compares with less dense ones, as is done here.
    """

    name = "restore-merge"
    summary = "half of the budget by another method, the rest merged around distinctive anchors"
    paper = "ICML 2026"
    unit = "picture"
    conserves_mass = True
    default_retain = 0.25

    base: Literal["divprune", "coverage", "otprune", "spacetime"] = "divprune"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> tokens of ``base``, and groups of the others."""
        valid, count = tokens.valid, count.to(tokens.valid.device)
        kept = self.retained(tokens, count // 2)
        target = torch.where(kept, torch.arange(kept.shape[1], device=kept.device), -1)
        for row, groups in enumerate((count - count // 2).tolist()):
            at = (valid[row] & ~kept[row]).nonzero()[:, 0]
            if groups and len(at):
                target[row, at] = at[self.groups(tokens.features[row, at], groups)]
        made = Reduction.merge(target, valid)
        return Reduction(made.kept, valid) if torch.equal(made.kept, target >= 0) else made

    def retained(self, tokens: TokenBatch, count: Tensor) -> Tensor:
        """``[N, n]`` bool: the ``count [N]`` tokens that ``base`` keeps."""
        chosen: ProjectorMethod = get_method(self.base)()  # type: ignore[assignment]
        return chosen.reduce(tokens, count).kept

    def groups(self, features: Tensor, count: int) -> Tensor:
        """``[n]`` long: the lower median member of the group of each token of ``features [n, D]``, in ``count`` groups."""
        owner = self.owners(features, count)
        order = owner.argsort(stable=True)
        _, sizes = owner[order].unique_consecutive(return_counts=True)
        first = sizes.cumsum(0) - sizes
        middle = order[first + (sizes - 1) // 2]
        return torch.empty_like(owner).scatter_(0, order, middle.repeat_interleave(sizes))

    def owners(self, features: Tensor, count: int) -> Tensor:
        """``[n]`` long: the anchor that each token of ``features [n, D]`` joins, of ``count``."""
        x = normalize(features.float(), dim=-1)[None]
        first = first_copies(x)
        like = pairs_of_first(torch.bmm(x, x.mT), first, 1.0)
        density = of_first(like.sum(2), first)
        sparser = density[:, None] < density[..., None]
        # the least dense has no other to be like
        nearest = like.masked_fill(~sparser, -torch.inf).amax(2).masked_fill(~sparser.any(2), 0.0)
        anchors = centres(density * (1 - nearest), count)[0]
        return anchors[like[0][:, anchors].argmax(1)].scatter(0, anchors, anchors)
