"""VFlowOpt before the language model: the least important tokens of every cell of the grid are recycled as one."""

import torch
from torch import Tensor

from ..core.masks import ranks, resorted
from ..core.reduction import Reduction, top_mask
from ..method import ProjectorMethod, Tap, TokenBatch, register


@register
class VFlowOptMerge(ProjectorMethod):
    """Tokens are dropped by their importance in the tower, and what is dropped of a cell of the grid stays as one token.

    *VFlowOpt: A Token Pruning Framework for LMMs with Visual Information Flow-Guided Optimization*, ICCV 2025,
    arXiv 2508.05211.

    The importance ``s_j`` is the attention that token ``j`` receives in the layer the language model reads, mean over heads
    and queries. Tokens are dropped from the lowest up. Those dropped with the same ``floor(row / cell)`` and ``floor(column /
    cell)`` of a frame, or of the base image or its tiles, become their mean weighted by ``s``, in the place of the most
    important of them. As many are dropped as it takes for ``count`` tokens to stay, recycled ones included.

    Where there are more cells than the budget has tokens, the most important of these stay.

    ``variant="official"``: the number dropped is rounded half to even.

    Parameters
    ----------
    cell : side of the cells, in tokens, a real number. The authors search it for every budget: 11.8 for half of the tokens,
        15.6 for a quarter, 17.4 for a tenth, on grids of 27 x 27 and more.

    Paper and program: the program drops ``round((1 - retain) n) + int(n / cell^2)`` tokens whatever the number of cells, so
    that some more or fewer than asked stay. It counts only queries that receive 28.7 to 39.3 times the mean attention, a bar
    searched for one model; here all queries count. The entropy of a patch, the other part of the paper's importance, has
    weight zero in all of its settings. It recycles tiled pictures only, and keeps newline tokens; here pictures and frames are
    recycled, and newline tokens are dropped first. ``vflowopt-inner`` is the two stages inside the language model; the recipe
    ``vflowopt`` has all three.
    """

    name = "vflowopt-merge"
    summary = "tokens by attention received in the tower, what is dropped of a cell recycled as one"
    paper = "arXiv 2508.05211"
    official_rounding = "dropped half even"
    unit = "picture"
    limits = {"cell": "(0, inf)"}

    cell: float = 15.6

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("received_attention"),)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``received_attention [N, n]``, ``cells``, ``segment``, ``count [N]`` -> the best tokens, and one of every cell."""
        score = tokens.signals["received_attention"][:, 0].float()
        here = tokens.celled & ~score.isnan()
        count = count.to(here.device)
        target = recycled(score, here, self.number(tokens), torch.minimum(count, here.sum(1)))
        merged = Reduction.merge(target, here, score.clamp(min=torch.finfo(torch.float32).tiny))
        # newline tokens last, the first of them first
        more = top_mask(torch.zeros_like(score), tokens.valid & ~here, count - merged.kept.sum(1))
        return Reduction(merged.kept | more, tokens.valid, merged.links)

    def number(self, tokens: TokenBatch) -> Tensor:
        """``[N, n]`` long: the cell of each token, counted over segments and frames."""
        time, row, column = tokens.cells.long().unbind(-1)
        row, column = ((x.double() / self.cell).floor().long() for x in (row, column))
        number = tokens.segment.long() * (time.amax() + 1) + time
        return (number * (row.amax() + 1) + row) * (column.amax() + 1) + column


def recycled(score: Tensor, here: Tensor, cell: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` long: the slot that each token flows into, such that ``count [N]`` stay; -1 for those that are gone.

    score : ``[N, n]``, how important tokens are; the higher slot goes first on a tie.
    here : ``[N, n]`` bool, the tokens that take part.
    cell : ``[N, n]`` long, which tokens are recycled together.
    """
    slots = torch.arange(score.shape[1], device=score.device).expand_as(score)
    # from the least important up, those that take no part at the end
    order = slots.flip(1)
    order = resorted(order, score.nan_to_num(nan=torch.inf).masked_fill(~here, torch.inf))
    order = resorted(order, (~here).long())
    turn = ranks(order)
    # by cell, within it in the order in which tokens are dropped
    grouped = resorted(order, cell.masked_fill(~here, -1))
    same = torch.zeros_like(here)
    of_cell = cell.masked_fill(~here, -1).gather(1, grouped)
    same[:, 1:] = of_cell[:, 1:] == of_cell[:, :-1]
    opens = torch.zeros_like(here).scatter(1, grouped, ~same) & here
    # after each drop one token fewer stays, but for the first of a cell, which is there as the recycled one
    size = here.sum(1, keepdim=True)
    left = size - (slots + 1) + opens.gather(1, order).long().cumsum(1)
    enough = (left > count[:, None]) & (slots < size)
    dropped = (turn < (enough.sum(1, keepdim=True) + 1) * (size > count[:, None])) & here
    # the last of a cell to be dropped is the most important of those
    gone = dropped.gather(1, grouped)
    follows = torch.zeros_like(here)
    follows[:, :-1] = same[:, 1:] & gone[:, 1:]
    last = gone & ~follows
    at = torch.where(last, slots, score.shape[1] - 1).flip(1).cummin(1).values.flip(1)
    into = torch.empty_like(slots).scatter(1, grouped, torch.where(gone, grouped.gather(1, at), grouped))
    kept = top_mask(score, here & (into == slots), count)
    return into.masked_fill(~here | ~kept.gather(1, into), -1)
