"""A picture or clip as frames of cells, and choices made frame by frame; shared by the methods that see time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.budget import split
from ..method import TokenBatch

#: entries of a block of pairs of tokens held at once
BLOCK = 1 << 24
#: entries of a block of features that stays in the cache of a core
CACHED = 1 << 18


@dataclass(frozen=True)
class Film:
    """Units of tokens laid out over time.

    frame : ``[N, n]`` long, the frame (t) of each token; -1 for tokens without a cell.
    place : ``[N, n]`` long, its cell within a frame in raster order; -1 without.
    slots : ``[N, T, P]`` long, the slot of each cell; -1 where no token is (any more). Where tiles of a picture share
        cells it names the first.
    """

    frame: Tensor
    place: Tensor
    slots: Tensor

    @staticmethod
    def of(tokens: TokenBatch) -> Film:
        """The film of every unit. A clip that the prompt spreads over many segments is one film."""
        valid, cells, grid = tokens.valid, tokens.cells, tokens.grid.to(tokens.valid.device)
        here = celled(tokens)
        frame = torch.where(here, cells[..., 0], -1)
        place = torch.where(here, cells[..., 1] * grid[:, 2:] + cells[..., 2], -1)
        rows, width = valid.shape
        frames, places = int(grid[:, 0].max()), int((grid[:, 1] * grid[:, 2]).max())
        at = torch.where(here, frame * places + place, frames * places)
        slot = torch.arange(width, device=valid.device).expand_as(at)
        slots = at.new_full((rows, frames * places + 1), width).scatter_reduce(1, at, slot, "amin")[:, :-1]
        return Film(frame, place, slots.masked_fill(slots == width, -1).view(rows, frames, places))

    def same_cell(self, frame: Tensor) -> Tensor:
        """``[N, n]`` long: the slot that has each token's cell in ``frame [N, n]``; -1 where there is none."""
        rows, frames, places = self.slots.shape
        at = frame.clamp(0, frames - 1) * places + self.place.clamp(min=0)
        slot = self.slots.view(rows, -1).gather(1, at)
        return slot.masked_fill((frame < 0) | (frame >= frames) | (self.place < 0), -1)

    def earlier(self) -> Tensor:
        """``[N, n]`` long: the slot that has each token's cell in the last frame before it that has one; else -1."""
        _, frames, places = self.slots.shape
        number = torch.arange(frames, device=self.slots.device)[:, None]
        last = torch.where(self.slots >= 0, number, -1).cummax(1).values
        before = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1).flatten(1)
        at = (self.frame.clamp(min=0) * places + self.place.clamp(min=0)).clamp(max=frames * places - 1)
        return self.same_cell(before.gather(1, at).masked_fill(self.frame < 0, -1))


def celled(tokens: TokenBatch) -> Tensor:
    """``[N, n]`` bool: tokens that have a cell; newlines and class tokens have none."""
    return tokens.valid & (tokens.cells >= 0).all(-1)


def frame_numbers(tokens: TokenBatch) -> Tensor:
    """``[N, n]`` long: frames of a clip, or tiles of a picture, numbered from 0 in order; -1 without a cell."""
    here, frames = celled(tokens), int(tokens.grid[:, 0].max())
    key = (tokens.tile * frames + tokens.cells[..., 0]).masked_fill(~here, -1)
    found = torch.zeros(len(key), max(2, int(key.max()) + 2), dtype=torch.long, device=key.device).scatter_(
        1, key + 1, 1
    )
    return (found[:, 1:].cumsum(1) - 1).gather(1, key.clamp(min=0)).masked_fill(~here, -1)


def cosine_to(features: Tensor, slots: Tensor) -> Tensor:
    """``[N, n]`` float32: cosine of each token of ``features [N, n, D]`` to the one at ``slots [N, n]``; -1 is its own. That
    of a token and its copy is one."""
    rows, n, width = features.shape
    row, own = torch.arange(rows, device=slots.device)[:, None], torch.arange(n, device=slots.device)
    at = torch.where(slots < 0, own, slots)
    cosine = torch.empty(rows, n, device=features.device)
    step = max(1, (CACHED if features.device.type == "cpu" else BLOCK) // max(1, rows * width))
    for left in range(0, n, step):
        block = slice(left, left + step)
        x, y = features[:, block].float(), features[row, at[:, block]].float()
        # three sums in one order, and sqrt(a a) is a: exact for copies
        square = ((x * x).sum(-1) * (y * y).sum(-1)).clamp(min=torch.finfo(torch.float32).tiny)
        cosine[:, block] = (x * y).sum(-1) / square.sqrt()
    return cosine.clamp_(max=1.0)


# --- choosing within groups -------------------------------------------------------------------------------------------
def group_sizes(group: Tensor, groups: int) -> Tensor:
    """``[N, groups]`` long: how many of ``group [N, n]`` are in each; -1 counts nowhere."""
    onto = torch.where(group < 0, groups, group)
    return torch.zeros(len(group), groups + 1, dtype=torch.long, device=group.device).scatter_add_(
        1, onto, torch.ones_like(onto)
    )[:, :groups]


def rank_in_groups(group: Tensor, groups: int, scores: Tensor | None = None) -> Tensor:
    """``[N, n]`` long: the rank of each slot within its group, highest score first, the lower slot on a tie.

    ``group [N, n]``; slots of group -1 get ranks that mean nothing. Without scores ranks follow the slots.
    """
    onto = torch.where(group < 0, groups, group)
    slot = torch.arange(group.shape[1], device=group.device).expand_as(group)
    order = slot
    if scores is not None:
        order = scores.float().nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, onto.gather(1, order).argsort(dim=1, stable=True))
    sizes = group_sizes(onto, groups + 1)
    start = sizes.cumsum(1) - sizes
    return torch.empty_like(order).scatter_(1, order, slot - start.gather(1, onto.gather(1, order)))


def top_in_groups(scores: Tensor, group: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: of every group the ``count [N, G]`` highest of ``scores [N, n]``; group -1 takes no part."""
    rank = rank_in_groups(group, count.shape[1], scores)
    return (rank < count.gather(1, group.clamp(min=0))) & (group >= 0)


def even_in_groups(group: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: of every group ``count [N, G]`` evenly spaced slots; group -1 takes no part."""
    rank, inside = rank_in_groups(group, count.shape[1]), group.clamp(min=0)
    size = group_sizes(group, count.shape[1]).gather(1, inside).clamp(min=1)
    k = torch.minimum(count.gather(1, inside), size)
    step = (rank + 1) * k + size // 2
    return (step // size > (step - k) // size) & (group >= 0)


# --- parts that are merged each for itself ----------------------------------------------------------------------------
def share(part: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Split budgets ``count [N]`` over the parts ``part [N, n]`` of each unit in proportion to their sizes.

    Returns the parts and ``[N, G]``, what each keeps. Where there are more parts than tokens may stay, neighbours are
    put together until each part keeps one.
    """
    wanted, found = count.tolist(), (part.amax(1) + 1).tolist()
    fewer = torch.tensor([max(1, min(a, b)) for a, b in zip(wanted, found, strict=True)], device=part.device)
    total = torch.tensor([max(1, b) for b in found], device=part.device)
    part = torch.where(part < 0, -1, part * fewer[:, None] // total[:, None])
    sizes = group_sizes(part, max(1, int(fewer.max())) if len(part) else 1)
    kept = [_one_each(split(k, size), size) for k, size in zip(wanted, sizes.tolist(), strict=True)]
    return part, torch.tensor(kept, device=part.device).view_as(sizes)


def _one_each(kept: list[int], sizes: list[int]) -> list[int]:
    """The same total with at least one for every part, if there are enough: small parts take from the largest."""
    poor = [i for i, size in enumerate(sizes) if size and not kept[i]]
    for i in poor if sum(kept) >= sum(size > 0 for size in sizes) else []:
        kept[kept.index(max(kept))] -= 1
        kept[i] = 1
    return kept


def alike(part: Tensor, kept: Tensor, pairs: bool = True) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Parts of the same size and budget together: rows ``[F, 1]``, slots ``[F, m]`` and the budget of each.

    ``part [N, n]``, ``kept [N, G]``. With ``pairs`` no more come at once than :data:`BLOCK` pairs of tokens.
    """
    sizes = group_sizes(part, kept.shape[1])
    start = sizes.cumsum(1) - sizes
    order = torch.where(part < 0, kept.shape[1], part).argsort(dim=1, stable=True)
    sorts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, (size, keep) in enumerate(zip(sizes.tolist(), kept.tolist(), strict=True)):
        for number, (m, k) in enumerate(zip(size, keep, strict=True)):
            if m and k:
                sorts.setdefault((m, k), []).append((row, number))
    for (m, k), found in sorts.items():
        at = max(1, BLOCK // (m * m)) if pairs else len(found)
        for first in range(0, len(found), at):
            which = torch.tensor(found[first : first + at], device=part.device)
            rows = which[:, :1]
            slots = start[rows, which[:, 1:]] + torch.arange(m, device=part.device)
            yield rows, order[rows, slots], k


def spare(others: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: the first ``count [N]`` (0 if negative) of ``others [N, n]``."""
    return others & (others.cumsum(1) <= count[:, None])
