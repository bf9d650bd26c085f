"""RESTORE, its reduction: half of the budget by another method, the other half by merging around distinctive anchors."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies, of_first, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import AttentionGuided, ModelFacts, ProjectorMethod, Tap, TokenBatch, register
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

    The paper then gives the picture its old share of attention in all layers, by the sizes of groups and a factor of distance:
    ``proportional="restore"``, an option of every recipe that does not touch the cache.

    Parameters
    ----------
    base : the method that keeps tokens, with its defaults; those of the paper are ``divprune``, ``holov`` and ``vispruner``.
    query : whose attention counts where ``base`` reads attention, see :class:`AttentionGuided`.

    Paper and program: by its names the program compares with denser tokens; it compares with less dense ones, as is done here.
    """

    name = "restore-merge"
    summary = "half of the budget by another method, the rest merged around distinctive anchors"
    paper = "ICML 2026"
    unit = "picture"
    conserves_mass = True
    default_retain = 0.25

    base: Literal["divprune", "coverage", "otprune", "spacetime", "holov", "vispruner"] = "divprune"

    query: Literal["auto", "cls", "all"] = "auto"

    def fit(self, family: ModelFacts) -> RestoreMerge:
        """This method with ``auto`` replaced by ``cls`` or ``all``, if ``base`` reads attention."""
        fitted = self.by_itself().fit(family)
        return replace(self, query=fitted.query) if isinstance(fitted, AttentionGuided) else self

    def by_itself(self) -> ProjectorMethod:
        """The method ``base``."""
        kind = get_method(self.base)
        options = {"query": self.query} if issubclass(kind, AttentionGuided) else {}
        return kind(**options)  # type: ignore[return-value]

    def taps(self) -> tuple[Tap, ...]:
        return self.by_itself().taps()

    def check(self, family: ModelFacts) -> None:
        self.by_itself().check(family)

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
        return self.by_itself().reduce(tokens, count).kept

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
