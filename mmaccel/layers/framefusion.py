"""FrameFusion: tokens similar to those of the previous frame are merged, the least attended of the rest are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.masks import ranks
from ..core.reduction import Reduction, top_mask
from ..errors import MmaccelError
from ..method import Grid, LayerMethod, TokenBatch
from ..method.blocks import cosine_to
from ..method.registry import register


@register
@dataclass(frozen=True)
class FrameFusion(LayerMethod):
    """Merge along time by hidden states, then prune by attention, in one step.

    *FrameFusion: Combining Similarity and Importance for Video Token Reduction on Large Vision Language Models*, ICCV
    2025, arXiv 2501.01986.

    Every token is compared with the previous one of its row and column (in the last earlier frame that still has it). Those
    whose hidden states have a cosine of at least ``similarity`` are merged, consecutive ones as one run: the first token
    becomes the plain mean of the run. If more tokens are similar than must go, only the most similar are merged; if fewer,
    the others to go are those that receive least attention from the last prompt token in layer ``layer - 1``, mean over
    heads (for a run: mean over its tokens). So the count is met exactly. Newline tokens have no previous token: they are
    never merged but may be dropped. In a single picture no token has one, so it is only pruned.

    ``variant="official"``: the number kept is rounded half to even.

    Parameters
    ----------
    layer : the input of this layer, 1 or more.
    similarity : 0.6 as in the program; above 1 nothing is merged.

    Paper and program: the authors merge before the attention of layer 0 and then after every layer's attention, until
    fewer than a tenth of the tokens are similar, and prune once at the next layer; here both happen at one layer, by the
    attention of the layer below. Merging before layer 0 is what methods at site ``projector`` do. The authors' budget is
    ``cost``, the mean share of tokens per layer, 0.3 for 28 layers; :func:`sparsity_needed` turns it into a share to drop:
    27.4 % stay from layer 1 on, the ``default_retain``. Their merging rounds the number dropped down, their pruning rounds
    the number kept half to even; ``variant="official"`` does the latter.
    """

    name = "framefusion"
    summary = "similar tokens of neighbouring frames merged, then the attended ones kept"
    paper = "arXiv 2501.01986"
    default_retain = 0.274

    layer: float = 1
    similarity: float = 0.6

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program's pruning rounds the number kept half to even."""
        return round(retain * size)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``prompt_attention [N, n]``, ``count [N]`` -> runs and single tokens."""
        valid, count = tokens.valid, count.to(tokens.valid.device)
        excess = (valid.sum(1) - count).clamp(min=0)
        merged = merge_runs(tokens.features, valid, tokens.cells, self.similarity, excess)
        attended = merged.substitute(tokens.signals["prompt_attention"].float())
        return merged.then(Reduction.top(attended, merged.kept, count))


def merge_runs(features: Tensor, valid: Tensor, cells: Tensor, similarity: float, most: Tensor) -> Reduction:
    """Merge tokens into the previous one of their cell where the cosine of the two is at least ``similarity``.

    Parameters
    ----------
    features : ``[N, n, D]``; ``valid [N, n]`` bool; ``cells [N, n, 3]`` (t, row, column), -1 for tokens without a cell.
    most : ``[N]`` long, how many may be merged away; the most similar are, the lower slot on a tie.
    """
    n = valid.shape[1]
    at = torch.arange(n, device=valid.device).expand_as(valid)
    placed = valid & (cells >= 0).all(-1)
    time, row, column = cells.long().unbind(-1)
    lane = (row * (column.max() + 1) + column).masked_fill(~placed, -1)
    # by lane (row and column), then by time; a token without a cell has lane -1
    order = (lane * (time.max() + 1) + time).masked_fill(~placed, -1).argsort(dim=1, stable=True)
    lane, time = lane.gather(1, order), time.gather(1, order)
    follows = torch.zeros_like(valid)
    follows[:, 1:] = (lane[:, 1:] >= 0) & (lane[:, 1:] == lane[:, :-1]) & (time[:, 1:] > time[:, :-1])

    # back to the order of slots, by which ties are broken
    back = ranks(order)
    earlier, follows = order.roll(1, 1).gather(1, back), follows.gather(1, back)
    cosine = cosine_to(features, earlier.masked_fill(~follows, -1))
    goes = top_mask(cosine, follows & (cosine >= similarity), most)
    if not bool(goes.any()):
        return Reduction(valid, valid)
    # a merged token flows into the last token before it in its lane that stays
    first = at.masked_fill(goes.gather(1, order), 0).cummax(1).values
    target = order.gather(1, first).gather(1, back)
    return Reduction.merge(target, valid)


def sparsity_needed(cost: float, layers: int, done: Sequence[float] = ()) -> float:
    """The share of the remaining tokens to drop at the next layer, such that layers have ``cost`` of the tokens on average.

    With ``done[i]`` the share dropped at layer ``i`` so far and ``s = prod (1 - done[i])`` the share left, each remaining layer
    may have ``r`` of the tokens left: ``sum_i prod_{j <= i} (1 - done[j]) + (layers - len(done)) s r = layers cost``. Returns
    ``1 - r``, or 0 if there is nothing to drop.

    Raises
    ------
    MmaccelError
        If the first ``len(done)`` layers have cost more than that already.
    """
    left, spent = 1.0, 0.0
    for share in done:
        left *= 1 - share
        spent += left
    room = layers * cost - spent
    if room < 0:
        raise MmaccelError(f"cost={cost} of {layers} layers is spent after {len(done)} of them; give a higher cost.")
    return max(0.0, 1 - room / ((layers - len(done)) * left))
