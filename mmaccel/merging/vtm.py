"""VTM: a few tokens of the clip receive, every other token is averaged into the one it resembles most."""

from typing import Literal

import torch
from torch import Tensor

from ..core.masks import even_in_groups
from ..core.reduction import Reduction, top_mask
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import nearest_kept
from .everest import moved
from .film import Film, spare_newlines


@register
class Vtm(ProjectorMethod):
    """Bipartite merging over the whole clip, with chosen receivers.

    *Video Token Merging for Long-form Video Understanding*, NeurIPS 2024, arXiv 2410.23782; its forms without training.

    As many tokens as the budget has are targets; every other token is averaged into the target of largest cosine, wherever
    in the clip it is, the first on a tie. A target becomes the plain mean of itself and all its members, and keeps its
    slot. Newlines are dropped first.

    Parameters
    ----------
    targets : ``uniform``, evenly spaced tokens (the paper's naive merging); ``centre``, those nearest the middle of their frame
        (its region-concentrated merging: what lies there is merged least); ``motion``, those farthest from the same cell of the
        frame before (motion-based; evenly spaced ones of a single picture).

    Paper and program: no program is public. The paper's best form learns which tokens are targets, from labelled clips. It
    samples targets more densely where they matter; here the choice is the densest possible one, without chance.
    """

    name = "vtm"
    summary = "every token averaged into the most alike of a few evenly spaced, central or moving ones"
    paper = "arXiv 2410.23782"
    unit = "picture"
    conserves_mass = True

    targets: Literal["uniform", "centre", "motion"] = "uniform"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the target that each token flows into."""
        here, count = tokens.celled, count.to(tokens.valid.device)
        extra = spare_newlines(tokens, count)
        chosen = self._chosen(tokens, count)
        slot = torch.arange(here.shape[1], device=here.device).expand_as(here)
        into = nearest_kept(tokens.features, chosen, here)
        flows = here & ~chosen & chosen.any(1, keepdim=True)
        return Reduction.merge(torch.where(chosen | extra, slot, torch.where(flows, into, -1)), tokens.valid)

    def _chosen(self, tokens: TokenBatch, count: Tensor) -> Tensor:
        """``[N, n]`` bool: the targets."""
        here = tokens.celled
        even = even_in_groups(torch.where(here, 0, -1), count[:, None])
        if self.targets == "uniform":
            return even
        if self.targets == "centre":
            middle = (tokens.grid[:, None, 1:].to(here.device) - 1) / 2
            return top_mask(-((tokens.cells[..., 1:] - middle) / (middle + 1)).square().sum(-1), here, count)
        earlier = Film.of(tokens).earlier()
        change = moved(tokens.features, earlier)
        single = (earlier < 0).all(1, keepdim=True)
        return torch.where(single, even, top_mask(change, here, count))
