"""HoliTom, inside the language model: tokens that FastV's ranking would drop are merged into the nearest kept token."""

import torch
from torch import Tensor

from ..core.reduction import Links, Reduction, top_mask
from ..method import Grid, LayerMethod, TokenBatch, register
from ..method.blocks import nearest_kept


@register
class HoliTomInner(LayerMethod):
    """Rank by the attention paid by the last prompt token, and merge instead of dropping.

    *HoliTom: Holistic Token Merging for Fast Video Large Language Models*, NeurIPS 2025, arXiv 2505.21334.

    The ``count`` visual tokens with the highest ``mean_h A_{layer - 1}[h, last, j]`` stay. Every other token flows into the
    kept one of largest cosine similarity between hidden states (the lower slot on a tie), one after the other in
    ascending order, each time ``h <- (h + x) / 2``. For a kept token with members ``x_1 .. x_m`` that is

        ``2^-m h + sum_i 2^-(m - i + 1) x_i``,

    whose weights sum to one, with more weight for later members than in a mean. Similarities are those before any merging,
    in blocks of rows. Positions are original; the layers below keep all tokens.

    ``variant="official"``: the number kept is rounded half to even.

    Parameters
    ----------
    layer : the input of this layer, counted from 0: 18 of 28 as in the authors' 7B runs, where half of the tokens left by
        their outer merging stay.

    Paper and program: the paper says that tokens are merged into the most similar one; the running average is the
    program's. Its script for the 72B model sets variables that are no longer read, so no inner merging happened there. It
    takes one video at a fixed place of a batch of one.
    """

    name = "holitom-inner"
    summary = "tokens the last prompt token attends to, the others merged into the nearest of them"
    paper = "arXiv 2505.21334"
    conserves_mass = True
    default_retain = 0.5

    layer: float = 18

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program is given the share to drop, and rounds what stays half to even."""
        return round(size * (1 - (1 - retain)))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``prompt_attention [N, n]``, ``features [N, n, D]``, ``count [N]`` -> kept tokens, and links of the others."""
        kept = top_mask(tokens.signals["prompt_attention"], tokens.valid, count)
        flows = tokens.valid & ~kept & kept.any(1, keepdim=True)
        if not bool(flows.any()):
            return Reduction(kept, tokens.valid)
        return Reduction(kept, tokens.valid, _halving(nearest_kept(tokens.features, kept), kept, flows))


def _halving(target: Tensor, kept: Tensor, flows: Tensor) -> Links:
    """Links of ``h <- (h + x) / 2`` over the members ``flows`` of each kept slot, in ascending order."""
    width = kept.shape[1]
    batch, source = flows.nonzero(as_tuple=True)
    into = batch * width + target[batch, source]
    # stable, so the members of a slot stay in ascending order
    order = into.argsort(stable=True)
    batch, source, into = batch[order], source[order], into[order]
    _, group, sizes = torch.unique_consecutive(into, return_inverse=True, return_counts=True)
    rank = torch.arange(len(into), device=into.device) - (sizes.cumsum(0) - sizes)[group]
    ends = (sizes.cumsum(0) - 1).long()
    return Links(
        torch.cat([batch, batch[ends]]),
        torch.cat([into % width, into[ends] % width]),
        torch.cat([source, into[ends] % width]),
        torch.exp2(-torch.cat([sizes[group] - rank, sizes]).float()),
    )
