"""A picture or clip as frames of cells; shared by the methods that compare frames or merge parts of a unit separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import group_sizes
from ..core.reduction import Links, Reduction
from ..method import TokenBatch
from ..method.blocks import BLOCK

#: slot, source and weight of the links of one clip, each ``[L]``
Flat = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Film:
    """Units of tokens laid out over time.

    frame : ``[N, n]`` long, the frame (t) of each token; -1 for tokens without a cell.
    place : ``[N, n]`` long, its cell within a frame in raster order, tile after tile where the frames of a clip have several;
        -1 without.
    slots : ``[N, T, P]`` long, the slot of each cell; -1 where no token is left. Where tiles of a picture share cells, the
        first slot.
    """

    frame: Tensor
    place: Tensor
    slots: Tensor

    @staticmethod
    def of(tokens: TokenBatch) -> Film:
        """The film of every unit; a clip whose frames the prompt separates is one film, if it is one unit."""
        valid, cells, grid = tokens.valid, tokens.cells, tokens.grid.to(tokens.valid.device)
        here = tokens.celled
        frame = torch.where(here, cells[..., 0], -1)
        place = torch.where(here, cells[..., 1] * grid[:, 2:] + cells[..., 2], -1)
        rows, width = valid.shape
        frames, places = int(grid[:, 0].max()), int((grid[:, 1] * grid[:, 2]).max())
        # of the frames of a clip each has as many tiles
        tiles = tokens.tiles.to(valid.device)
        each = torch.where(grid[:, 0] > 1, tiles // grid[:, 0].clamp(min=1), 1).clamp(min=1)
        place = torch.where(here, tokens.tile % each[:, None] * places + place, -1)
        places *= int(each.max())
        at = torch.where(here, frame * places + place, frames * places)
        slot = torch.arange(width, device=valid.device).expand_as(at)
        slots = at.new_full((rows, frames * places + 1), width).scatter_reduce(1, at, slot, "amin")[:, :-1]
        return Film(frame, place, slots.masked_fill(slots == width, -1).view(rows, frames, places))

    def same_cell(self, frame: Tensor) -> Tensor:
        """``[N, n]`` long: the slot with the same cell as each token in frame ``frame [N, n]``; -1 where there is none."""
        rows, frames, places = self.slots.shape
        at = frame.clamp(0, frames - 1) * places + self.place.clamp(min=0)
        slot = self.slots.view(rows, -1).gather(1, at)
        return slot.masked_fill((frame < 0) | (frame >= frames) | (self.place < 0), -1)

    def earlier(self) -> Tensor:
        """``[N, n]`` long: the slot with the same cell as each token in the last earlier frame that has it; else -1."""
        _, frames, places = self.slots.shape
        number = torch.arange(frames, device=self.slots.device)[:, None]
        last = torch.where(self.slots >= 0, number, -1).cummax(1).values
        before = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1).flatten(1)
        at = (self.frame.clamp(min=0) * places + self.place.clamp(min=0)).clamp(max=frames * places - 1)
        return self.same_cell(before.gather(1, at).masked_fill(self.frame < 0, -1))


# --- unit by unit -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Clip:
    """One unit whose budget is below its size, as frames of cells; a picture, perhaps of many tiles, is one frame.

    row : which unit it is.
    slots : ``[T, P]`` long, the slot of each cell; 0 where no token is.
    valid : ``[T, P]`` bool, the cells that hold a token.
    count : its budget.
    size, cells : how many tokens it has, and how many of them have a cell.
    """

    row: int
    slots: Tensor
    valid: Tensor
    count: int
    size: int
    cells: int


def by_clip(tokens: TokenBatch, count: Tensor, links: Callable[[Clip], Flat]) -> Reduction:
    """A reduction made unit by unit, on the host; ``links`` of a clip number slots and sources ``t P + p``.

    A unit whose budget ``count [N]`` holds all its tokens, or that has no cells, keeps its first tokens as they are.
    """
    film, here = Film.of(tokens), tokens.celled
    parts: list[tuple[Tensor, ...]] = []
    sizes = zip(count.tolist(), tokens.valid.sum(1).tolist(), here.sum(1).tolist(), strict=True)
    for row, (wanted, size, cells) in enumerate(sizes):
        if not wanted:
            continue
        if wanted >= size or not cells:
            flat = themselves(tokens.valid[row].nonzero()[:wanted, 0])
        else:
            frames = int(tokens.grid[row, 0])
            slots = film.slots[row, :frames] if frames > 1 else here[row].nonzero().T
            clip = Clip(row, slots.clamp(min=0), slots >= 0, wanted, size, cells)
            slot, source, weight = links(clip)
            flat = clip.slots.flatten()[slot], clip.slots.flatten()[source], weight
        parts.append((torch.full_like(flat[0], row), *flat))
    kept = torch.zeros_like(here)
    if not parts:
        return Reduction(kept, tokens.valid)
    batch, slot, source, weight = (torch.cat(part) for part in zip(*parts, strict=True))
    kept[batch, slot] = True
    return Reduction(kept, tokens.valid, Links(batch, slot, source, weight).sorted(here.shape[1]))


def frame_means(x: Tensor, valid: Tensor) -> Tensor:
    """``[T, D]``: the mean of the tokens of every frame of ``x [T, P, D]`` that are ``valid [T, P]``; 0 without any."""
    return (x * valid[..., None]).sum(1) / valid.sum(1).clamp(min=1)[:, None]


def joined(parts: Iterable[Flat]) -> Flat:
    """The links of several parts as one."""
    slot, source, weight = (torch.cat(part) for part in zip(*parts, strict=True))
    return slot, source, weight


def themselves(slots: Tensor) -> Flat:
    """Links of ``slots [L]`` that stay as they are."""
    return slots, slots, torch.ones(len(slots), device=slots.device)


# --- parts that are merged separately ---------------------------------------------------------------------------------
def share(part: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Apportion budgets ``count [N]`` to the parts ``part [N, n]`` of each unit by their sizes.

    Returns the parts and ``[N, G]`` long, how many tokens each keeps. Where a unit has more parts than its budget has tokens,
    neighbouring parts are joined until each keeps one.
    """
    wanted, numbers = count.tolist(), (part.amax(1) + 1).tolist()
    fewer = torch.tensor([max(1, min(a, b)) for a, b in zip(wanted, numbers, strict=True)], device=part.device)
    total = torch.tensor([max(1, b) for b in numbers], device=part.device)
    part = torch.where(part < 0, -1, part * fewer[:, None] // total[:, None])
    sizes = group_sizes(part, max(1, int(fewer.max())) if len(part) else 1)
    kept = [_one_each(apportion(k, size), size) for k, size in zip(wanted, sizes.tolist(), strict=True)]
    return part, torch.tensor(kept, device=part.device).view_as(sizes)


def _one_each(kept: list[int], sizes: list[int]) -> list[int]:
    """The same total with at least one for every part that is not empty, if the total allows; the largest give them up."""
    poor = [i for i, size in enumerate(sizes) if size and not kept[i]]
    for i in poor if sum(kept) >= sum(size > 0 for size in sizes) else []:
        kept[kept.index(max(kept))] -= 1
        kept[i] = 1
    return kept


def equal_parts(part: Tensor, kept: Tensor, pairs: bool = True) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Parts of equal size and budget as batches: rows ``[F, 1]``, slots ``[F, m]`` and the budget of each part.

    ``part [N, n]`` and ``kept [N, G]`` as :func:`share` returns them. With ``pairs`` a batch has at most :data:`BLOCK` pairs
    of tokens.
    """
    sizes = group_sizes(part, kept.shape[1])
    start = sizes.cumsum(1) - sizes
    order = torch.where(part < 0, kept.shape[1], part).argsort(dim=1, stable=True)
    sorts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, (size, keep) in enumerate(zip(sizes.tolist(), kept.tolist(), strict=True)):
        for number, (m, k) in enumerate(zip(size, keep, strict=True)):
            if m and k:
                sorts.setdefault((m, k), []).append((row, number))
    for (m, k), members in sorts.items():
        at = max(1, BLOCK // (m * m)) if pairs else len(members)
        for first in range(0, len(members), at):
            which = torch.tensor(members[first : first + at], device=part.device)
            rows = which[:, :1]
            slots = start[rows, which[:, 1:]] + torch.arange(m, device=part.device)
            yield rows, order[rows, slots], k


def newline_targets(tokens: TokenBatch, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that have a cell, ``[N, n]`` bool; ``count [N]`` on their device; and ``[N, n]`` long, the own slot of those
    without a cell (newlines) that the budget has room for beside them, -1 for all others."""
    celled, count = tokens.celled, count.to(tokens.valid.device)
    return (
        celled,
        count,
        torch.where(spare_newlines(tokens, count), torch.arange(celled.shape[1], device=celled.device), -1),
    )


def spare_newlines(tokens: TokenBatch, count: Tensor) -> Tensor:
    """``[N, n]`` bool: the first tokens without a cell, as many as ``count [N]`` leaves room for behind those with one."""
    others, room = tokens.valid & ~tokens.celled, count.to(tokens.valid.device) - tokens.celled.sum(1)
    return others & (others.cumsum(1) <= room[:, None])
