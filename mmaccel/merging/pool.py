"""Pooling: neighbouring grid cells are averaged, the baseline of merging."""

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from .film import share


@register
class Pool(ProjectorMethod):
    """Average-pool the grid into ``t' x a x b`` windows, at most ``count`` of them.

    A cell ``(f, r, c)`` of a grid ``(t, h, w)`` falls into window ``(f t' // t, r a // h, c b // w)``, so windows tile
    the grid and differ by at most one cell a side. Every frame is pooled by itself (``t' = t``) unless there are more
    frames than the budget has tokens. Of the ``a x b`` that fit the budget, the one with the largest
    ``a b min(h b, w a) / max(h b, w a)`` is used: many windows, close to square, the smaller ``a`` on a tie.
    A window takes the slot and position of its first token.

    Tokens without a cell (newlines) are dropped, unless the whole unit stays or has no cells at all. LLaVA-OneVision and
    others average frames like this; the choice of windows for any budget is ours.
    """

    name = "pool"
    summary = "average of neighbouring grid cells (baseline)"
    budget = "at_most"
    conserves_mass = True
    foreseen = "grid"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``cells [N, n, 3]``, ``grid [N, 3]``, ``count [N]`` -> ``target [N, n]``, the first slot of each window."""
        valid, cells = tokens.valid, tokens.cells
        slots = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
        size, count = valid.sum(1), count.to(valid.device)
        windows = window_grid(tokens.grid.to(valid.device), count)

        here = tokens.celled & (count > 0)[:, None]
        at = (cells * windows[:, None] // tokens.grid.to(valid.device)[:, None].clamp(min=1)).clamp(min=0)
        window = (at[..., 0] * windows[:, None, 1] + at[..., 1]) * windows[:, None, 2] + at[..., 2]
        # tokens without a window are in one extra window at the end
        last = int(windows.prod(1).max()) if len(windows) else 0
        window = window.masked_fill(~here, last)
        first = slots.new_full((len(slots), last + 1), slots.shape[1])
        first = first.scatter_reduce(1, window, slots, "amin")
        target = first.gather(1, window).masked_fill(~here, -1)

        whole = (count >= size)[:, None]
        bare = ~here.any(1, keepdim=True) & (slots < count[:, None])
        return Reduction.merge(torch.where(whole | bare, slots, target), valid)


def pool_parts(tokens: TokenBatch, part: Tensor, count: Tensor) -> Reduction:
    """Average-pool the parts of each unit (tiles of a picture, frames of a clip) separately, as :class:`Pool` does with whole
    units.

    ``part [N, n]`` numbers them from 0, tokens of -1 are dropped; ``count [N]`` is apportioned to parts by size. The grid of a
    part is the bounding box of its cells. Units whose ``count`` holds all their tokens stay as they are.
    """
    part, kept = share(part.masked_fill(~tokens.valid, -1), count)
    return pool_by(tokens, part, kept, count)


def pool_by(tokens: TokenBatch, part: Tensor, kept: Tensor, count: Tensor) -> Reduction:
    """Average-pool every part ``part [N, n]`` of a unit into ``kept [N, G]`` windows at most, none where that is 0.

    Units whose ``count [N]`` holds all their tokens stay as they are, and those without parts keep their first ``count``.
    """
    valid, part = tokens.valid, part.masked_fill(~tokens.valid, -1)
    count = count.to(valid.device)
    whole = count >= valid.sum(1)
    bare = valid & ~(part >= 0).any(1, keepdim=True)
    stays = (valid & whole[:, None]) | (bare & (bare.cumsum(1) <= count[:, None]))
    unit, number = ((kept > 0) & ~whole[:, None]).nonzero(as_tuple=True)
    if not len(unit):
        return Reduction(stays, valid)
    mine = part[unit] == number[:, None]
    place = tokens.cells[unit, :, 1:]
    corner = place.masked_fill(~mine[..., None], int(tokens.cells.max()) + 1).amin(1)
    place = (place - corner[:, None]).masked_fill(~mine[..., None], -1)
    each = TokenBatch(
        # windows are a matter of cells, and a copy for every part would be large
        features=tokens.features[unit, :, :0],
        valid=mine,
        cells=torch.cat([torch.where(mine, 0, -1)[..., None], place], -1),
        grid=torch.cat([torch.ones_like(corner[:, :1]), place.amax(1) + 1], 1),
        segment=tokens.segment[unit],
    )
    slots = torch.arange(valid.shape[1], device=valid.device).expand_as(mine)
    pooled = Pool().reduce(each, kept[unit, number]).relabel(slots, unit, valid.shape)
    pooled = pooled.keeping(stays)
    return Reduction(pooled.kept, valid, pooled.links)


def window_grid(grid: Tensor, count: Tensor) -> Tensor:
    """``[N, 3]`` long: the number of windows (t', a, b) for grids ``[N, 3]`` and budgets ``[N]``; see :class:`Pool`."""
    t, h, w = grid.clamp(min=1).unbind(1)
    frames = torch.minimum(t, count.clamp(min=1))
    share = (count // frames).clamp(min=1)
    a = torch.arange(1, int(h.max()) + 1 if h.numel() else 1, device=grid.device)[None]
    b = torch.minimum(w[:, None], share[:, None] // a)
    tall, wide = (h[:, None] * b).double(), (w[:, None] * a).double()
    merit = a * b * torch.minimum(tall, wide) / torch.maximum(tall, wide)
    merit = merit.masked_fill((a > h[:, None]) | (b < 1), -1.0)
    best = merit.argmax(1)
    return torch.stack([frames, best + 1, b.gather(1, best[:, None])[:, 0]], 1)
