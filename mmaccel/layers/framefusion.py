"""FrameFusion: tokens similar to those of the previous frame are merged, the least attended of the rest are dropped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.budget import layer_at
from ..core.masks import ranks
from ..core.reduction import Reduction, top_mask
from ..errors import MmaccelError
from ..method import LayerMethod, ModelFacts, TokenBatch, register
from ..method.blocks import cosine_to

#: a layer that merges less of the tokens is the last to merge
LEAST = 0.1


@register
class FrameFusion(LayerMethod):
    """Merge along time by hidden states, then prune by attention: in one step, or layer after layer as in the paper.

    *FrameFusion: Combining Similarity and Importance for Video Token Reduction on Large Vision Language Models*, ICCV
    2025, arXiv 2501.01986.

    Every token is compared with the previous one of its row and column (in the last earlier frame that still has it). Those
    whose hidden states have a cosine of at least ``similarity`` are merged, consecutive ones as one run: the first token
    becomes the plain mean of the run. Newline tokens have no previous token: they are never merged but may be dropped. In a
    single picture no token has one, so it is only pruned. The importance of a token is the attention it receives from the last
    prompt token in the layer below, mean over heads (for a run: mean over its tokens).

    **In one step**, at ``layer``, the count is met exactly. If more tokens are similar than must go, only the most similar
    are merged; if fewer, the least important of the rest are dropped.

    **With** ``through``, as in the recipe ``framefusion``, it works at every layer from ``layer`` to that one, and ``retain``
    is the share of a picture's tokens that these layers have *on average*. If the layers before held shares ``a_i``, the next
    ones may drop ``d = 1 - (layers retain - sum_i a_i) / (layers left * a)`` of what is left (:func:`sparsity_needed`).
    Similar tokens are merged until that reaches ``d``, the most similar first; then it ends. Once a layer merges less than a
    tenth, the next prunes to ``n (1 - d)`` by importance, and it ends. A layer that no other could follow within the budget
    prunes at once, so that the average is met. In the end less than ``retain`` is left, depending on the content.

    ``variant="official"``: what merging drops is rounded down and what pruning keeps half to even; layer after layer, a budget
    that merging has overrun is an error, and merging that never falls below a tenth may end above the budget.

    Parameters
    ----------
    layer : the input of this layer; with ``through`` 0 is possible, as in the paper: what enters the language model.
    similarity : 0.6 as in the program; above 1 nothing is merged.
    through : the last layer at which it works; None is ``layer`` itself. 1.0 is the last of the model.

    Paper and program: the program works between attention and MLP of a layer, here always at the input of a layer, half a
    layer later; counts and averages are the same. Its budget ``cost`` is ``retain`` of the recipe, 0.3 of 28 layers. In models
    that add DeepStack features, the average is over the layers behind these. Every picture and clip has its own budget here.
    """

    name = "framefusion-step"
    summary = "similar tokens of neighbouring frames merged, then the attended ones kept"
    paper = "arXiv 2501.01986"
    official_rounding = "half even"
    default_retain = 0.274
    lowest = 0
    limits = {"through": "[0, inf) or (0.0, 1.0]"}

    layer: float = 1
    similarity: float = 0.6
    through: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.through is None and isinstance(self.layer, int) and self.layer < 1:
            raise MmaccelError(
                f"{self.name} at one layer prunes by the attention before it; give a layer of 1 or more, or through=1.0."
            )

    def fit(self, family: ModelFacts) -> FrameFusion:
        fitted = super().fit(family)
        assert isinstance(fitted, FrameFusion)
        if self.through is None or isinstance(self.through, int):
            return fitted
        last = min(layer_at(self.through, family.depth), family.depth - 1)
        return replace(fitted, through=max(int(fitted.layer), last))

    @property
    def spreads(self) -> bool:  # type: ignore[override]
        return self.through is not None

    def layers(self) -> range:
        return range(int(self.layer), int(self.layer if self.through is None else self.through) + 1)

    def is_done(self, left: Tensor, count: Tensor) -> bool:
        return all(most == 0 and kept == size for most, kept, size in self.steps(left, count))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``prompt_attention [N, n]``, ``count [N]`` -> runs and single tokens."""
        valid, count = tokens.valid, count.to(tokens.valid.device)
        most = (valid.sum(1) - count).clamp(min=0)
        if self.spreads:
            steps = self.steps(tokens.left, count.cpu())
            most, count, _ = torch.tensor(steps, device=valid.device).view(-1, 3).unbind(1)
        merged = merge_runs(tokens.features, valid, tokens.cells, self.similarity, most)
        attended = tokens.signals.get("prompt_attention")
        if attended is None:
            # of what enters the first layer nothing is known yet
            return merged
        return merged.then(Reduction.top(merged.substitute(attended.float()), merged.kept, count))

    def steps(self, left: Tensor, count: Tensor) -> list[tuple[int, int, int]]:
        """For every picture how many tokens may be merged away at this layer, how many are then to be left, and how many there
        are, by how many there were at every layer so far, ``left [N, c]``, and on average ``count [N]`` may be."""
        return [
            self._step(row, share / max(row[0], 1)) for row, share in zip(left.tolist(), count.tolist(), strict=True)
        ]

    def _step(self, left: list[float], cost: float) -> tuple[int, int, int]:
        layers, size, merging = len(self.layers()), round(left[-1]), True
        done: list[float] = []
        for before, after in itertools.pairwise(left):
            if before - after >= self._going(before, cost, done) or not merging:
                return 0, size, size
            done.append(1 - after / before)
            merging = done[-1] >= LEAST
        if not size:
            return 0, 0, 0
        most = self._going(size, cost, done)
        kept = max(1, size - most)
        if not merging:
            return 0, max(1, round(size * (1 - self._needed(cost, done)))) if self.official else kept, size
        # if nothing merges here, and one token a picture is left from the next layer on
        waiting = sum(left[1:]) + left[-1] + layers - len(left)
        last = not self.official and waiting > layers * cost * left[0]
        return most, kept if last else size, size

    def _going(self, size: float, cost: float, done: list[float]) -> int:
        """How many of ``size`` tokens the budget has no room for."""
        most = self._needed(cost, done) * size
        return int(most) if self.official else math.ceil(most - 1e-9)

    def _needed(self, cost: float, done: list[float]) -> float:
        """:func:`sparsity_needed`; everything, where the budget is spent."""
        try:
            return sparsity_needed(cost, len(self.layers()), done)
        except MmaccelError:
            if self.official:
                raise
            return 1.0


def merge_runs(features: Tensor, valid: Tensor, cells: Tensor, similarity: float, most: Tensor) -> Reduction:
    """Merge tokens into the previous one of their cell where the cosine of the two is at least ``similarity``.

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

    Raises :class:`MmaccelError` if the first ``len(done)`` layers have cost more than that already.
    """
    left, spent = 1.0, 0.0
    for share in done:
        left *= 1 - share
        spent += left
    room = layers * cost - spent
    if room < 0:
        raise MmaccelError(f"cost={cost} of {layers} layers is spent after {len(done)} of them; give a higher cost.")
    return max(0.0, 1 - room / ((layers - len(done)) * left))
