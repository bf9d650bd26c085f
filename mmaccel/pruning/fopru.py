"""FoPru: keep the patches, or the rows of patches, that the vision tower attends to."""

from typing import Literal

import torch
from torch import Tensor

from ..core.masks import ranks, resorted
from ..core.reduction import Reduction
from ..method import AttentionGuided, Grid, TokenBatch, register


@register
class FoPru(AttentionGuided):
    """Focal pruning: rank by attention in the vision tower, tokens one by one or whole rows of the grid.

    *FoPru: Focal Pruning for Efficient Large Vision-Language Models*, arXiv 2411.14164.

    ``s_j = mean_h mean_i A[h, i, j]`` in the layer the language model reads. ``rank`` keeps the ``count`` highest; ``row``
    keeps the rows of the grid with the highest mean of ``s`` until the budget is spent; of the last of these rows only the
    best tokens stay, so that the count is met exactly. On a tie the upper row comes first. Every frame has its own rows.

    ``variant="official"``: ``int(retain * n)`` tokens, and ``round(retain * h)`` whole rows where a picture is one grid
    without newlines.

    Parameters
    ----------
    strategy : ``rank`` or ``row``.
    query : ``all`` (the default) needs no CLS token; ``cls`` with ``rank`` is ``vtc-cls``.
    layer : tower layer; the default is the one read, CLIP's last but one.

    Paper and program: no program is public. Which rows of the attention map the paper averages, its rounding and the partial
    row are our reading; the authors publish no numbers to compare with.
    """

    name = "fopru"
    summary = "tokens or rows of tokens that get most attention in the vision tower"
    paper = "arXiv 2411.14164"
    limits = {"query": ("auto", "cls", "all")}

    query: Literal["cls", "all"] = "all"
    strategy: Literal["rank", "row"] = "rank"

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Tokens rounded down; for ``row`` whole rows rounded half to even, at least one."""
        if self.strategy == "row" and grid is not None and grid[0] * grid[1] * grid[2] == size:
            return max(1, round(retain * grid[0] * grid[1])) * grid[2]
        return int(retain * size)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, ``count [N]`` -> the highest tokens or rows; tokens without a source are dropped first."""
        score, seen = self.attention(tokens)
        if self.strategy == "row":
            score = _by_rows(score, seen & tokens.celled, tokens)
        return Reduction.top(score, tokens.valid, count)


def _by_rows(score: Tensor, here: Tensor, tokens: TokenBatch) -> Tensor:
    """``[N, n]``: minus the rank of each token, ordered by the mean of its row, then the row, then its own score."""
    slots = torch.arange(score.shape[1], device=score.device).expand_as(score)
    row = tokens.cells[..., 0] * tokens.grid[:, None, 1].to(score.device) + tokens.cells[..., 1]
    # tokens without a row are in one extra row at the end
    last = int(row.max()) + 1 if row.numel() else 0
    row = row.masked_fill(~here, last)
    first = slots.new_full((len(slots), last + 1), slots.shape[1]).scatter_reduce(1, row, slots, "amin")
    target = first.gather(1, row).masked_fill(~here, -1)
    means = Reduction.merge(target, here).substitute(score.nan_to_num())
    mean = means.gather(1, target.clamp(min=0)).masked_fill(~here, -torch.inf)
    order = score.nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True)
    return -ranks(resorted(resorted(order, row), mean, descending=True)).float()
