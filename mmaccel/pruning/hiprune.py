"""HiPrune: anchors of a middle layer of the tower with their neighbours, and the tokens that its last layer attends to."""

import torch
from torch import Tensor

from ..core.masks import true_first
from ..core.reduction import Reduction, top_mask
from ..method import ProjectorMethod, Tap, TokenBatch, register
from ._shared import beside, filled


@register
class HiPrune(ProjectorMethod):
    """Anchor, buffer and register tokens by the attention that tokens receive in two layers of the vision tower.

    *HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention in Vision-Language Models*, arXiv 2508.00553.

    ``s_l[j] = mean_h mean_i A_l[h, i, j]``. Of a budget of ``k`` the ``round(k alpha / 5)`` tokens of highest ``s`` in the
    middle layer are anchors; their four neighbours on the grid are buffers; the others are those of highest ``s`` in the layer
    that the language model reads. Where anchors and buffers are more than ``k``, anchors come first, then buffers by ``s`` of
    the deep layer.

    ``variant="official"``: neighbours are the tokens ``a - 1``, ``a + 1``, ``a - w`` and ``a + w`` in raster order, where the
    end of a row has the begin of the next as its neighbour, and places outside the picture become its first or last token;
    the budget is rounded down.

    Parameters
    ----------
    alpha : share of the budget for anchors and buffers; 0.1 as in the program.
    middle : tower layer; a float is a share of its depth. The program takes layer 8 of 24 (counted from 0) for CLIP, and 15 of
        32 for Qwen2.5-VL.
    deep : tower layer; ``None`` is the one the language model reads.

    Paper and program: the program splits a number of tokens over tiles evenly; here they share the budget
    by the number of their tokens. Newline tokens are dropped first.
    """

    name = "hiprune"
    summary = (
        "tokens a middle layer of the tower attends to with their neighbours, then those of the layer that is read"
    )
    paper = "arXiv 2508.00553"
    official_rounding = "down"
    unit = "tile"
    limits = {"alpha": "[0, 1]"}

    alpha: float = 0.1
    middle: float = 8 / 24
    deep: float | None = None

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("received_attention", (self.middle, self.deep)),)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``received_attention [N, 2, n]``, ``cells [N, n, 3]``, ``count [N]`` -> anchors, buffers and registers."""
        middle, deep = tokens.signals["received_attention"].float().unbind(1)
        seen = tokens.valid & ~middle.isnan() & ~deep.isnan()
        room = torch.minimum(count.to(seen.device), seen.sum(1))
        # half to even, in the float64 of the program
        anchors = top_mask(middle, seen, (room.double() * self.alpha / 5).round().long())
        buffers = _official_around(anchors, seen, tokens.grid) if self.official else _around(anchors, tokens)
        # a mean of attention is at most one
        merit = deep + 4.0 * anchors + 2.0 * (buffers & seen)
        return Reduction(filled(top_mask(merit, seen, room), tokens.valid, count), tokens.valid)


def _around(anchors: Tensor, tokens: TokenBatch) -> Tensor:
    """``[N, n]`` bool: tokens beside, above or below one of ``anchors [N, n]`` in its frame."""
    near = torch.zeros_like(anchors)
    for slot, exists in beside(tokens, ((-1, 0), (1, 0), (0, -1), (0, 1))):
        near |= exists & anchors.gather(1, slot)
    return near


def _official_around(anchors: Tensor, seen: Tensor, grid: Tensor) -> Tensor:
    """``[N, n]`` bool: the neighbours of ``anchors`` in raster order, as the program counts them."""
    order, place, last = true_first(seen), seen.cumsum(1) - 1, seen.sum(1, keepdim=True) - 1
    hits, width = torch.zeros_like(anchors, dtype=torch.long), grid[:, 2:].to(seen.device)
    for step in (torch.ones_like(width), width):
        for at in (place - step, place + step):
            slot = order.gather(1, torch.minimum(at.clamp(min=0), last.clamp(min=0)))
            hits = hits.scatter_add(1, slot, anchors.long())
    return hits > 0
