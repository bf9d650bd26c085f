"""STTM: inside the language model, the cells of a frame are merged by a quadtree, and what is alike along time too."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..errors import MmaccelError
from ..method import LayerAttention, LayerMethod, TokenBatch, register
from ..method.blocks import cosine_of, frame_numbers


@register
class Sttm(LayerMethod):
    """Coarse cells where a frame is uniform, fine ones where it is not, and one cell for what stays over time.

    *Multi-Granular Spatio-Temporal Token Merging for Training-Free Acceleration of Video LLMs*, ICCV 2025, arXiv 2507.07990.

    Over every frame stands a pyramid: cells of 2x2 are averaged until a side is 2; where a side is odd its first row or column
    makes cells of its own. From ``root`` levels below the top a cell stays whole if its cosine with each of its children is at
    least ``spatial``, else it is split. Cells of neighbouring frames of which one contains the other are linked if their
    cosine is at least ``temporal``; linked cells become one, the mean of all of them, in the place of the first.

    The thresholds decide, and ``retain`` is an upper limit: where more would stay, the ones that represent fewest tokens (the
    later on a tie) are dropped. The weights of a kept token sum to one. A unit with room for all tokens is merged too. Tokens
    without a cell, and those of a unit that an earlier stage has thinned, are not merged.

    Parameters
    ----------
    layer : the input of this layer; 2 as in the program.
    spatial, temporal : 0.85 and 0.6 as in the program's scripts for half of the tokens; above 1 nothing is merged that way.
    root : 1 as in the scripts.
    weighted : means over tokens; otherwise over cells, which the program does by default.
    heads : the cosine is the mean of those of this many slices of the features.
    single : a cell is linked with only one of the frame before, the most similar (the first on a tie); the program's ``slow``.

    Paper and program: the program renumbers positions; here a token keeps that of the first token of its cell.

    ``variant="official"``: a cell with fewer than four children is compared with the first cell below it as well, so that
    borders are split too often, and links end to spread before they have reached everything. With ``single`` a link is left
    out only where the next more similar one of the two frames is of the same cell.
    """

    name = "sttm"
    summary = "cells of a quadtree over every frame, and of these what stays alike over time, averaged (adaptive)"
    paper = "arXiv 2507.07990"
    budget = "adaptive"
    default_retain = 1.0
    limits = {"root": "[0, inf)", "heads": "[1, inf)"}

    layer: float = 2
    spatial: float = 0.85
    temporal: float = 0.6
    root: int = 1
    weighted: bool = False
    heads: int = 1
    single: bool = False

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        return {}

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the cell that each token flows into."""
        if tokens.features.shape[2] % self.heads:
            raise MmaccelError(
                f"sttm cannot cut features of {tokens.features.shape[2]} into heads={self.heads} slices."
            )
        valid, number = tokens.valid, frame_numbers(tokens)
        slot = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
        target, weight = torch.where(valid, slot, -1), torch.ones(valid.shape, device=valid.device)
        for row, (t, h, w) in enumerate(tokens.grid.tolist()):
            mine = (number[row] >= 0).nonzero()[:, 0]
            if not len(mine):
                continue
            at = number[row, mine], tokens.cells[row, mine, 1], tokens.cells[row, mine, 2]
            held = torch.zeros(int(at[0].max()) + 1, h, w, dtype=torch.bool, device=valid.device)
            x = tokens.features.new_zeros(*held.shape, tokens.features.shape[2], dtype=torch.float32)
            held[at], x[at] = True, tokens.features[row, mine].float()
            place = torch.full_like(held, -1, dtype=torch.long)
            place[at] = mine
            label, share = self.film(x, held, along_time=t > 1)
            target[row, mine] = place.flatten()[label[at]]
            weight[row, mine] = share[at]
        merged = Reduction.merge(target, valid, weight)
        return merged.then(Reduction.top(merged.mass(), merged.kept, count))

    def film(self, x: Tensor, held: Tensor, along_time: bool = True) -> tuple[Tensor, Tensor]:
        """The cell, as its first place ``(f H + y) W + x``, that every place of the frames ``x [F, H, W, D]`` is merged
        into, and its weight there, ``[F, H, W]`` each; ``held [F, H, W]`` bool are the places that hold a token."""
        levels = self._pyramid(x, held)
        cells = self._split(levels, held)
        places = torch.arange(held.numel(), device=x.device).view_as(held)
        own = cells.corner + places[:, :1, :1]
        first = torch.full_like(places.flatten(), held.numel())
        first = first.scatter_reduce(0, own[held], places[held], "amin")
        home = first[own].clamp(max=held.numel() - 1)
        share = torch.ones_like(cells.share) if self.weighted else cells.share
        if not along_time or len(x) < 2:
            return home, share
        cosine = self._cosine(cells.x[:-1], cells.x[1:])
        alike = held[1:] & held[:-1] & (cosine >= self.temporal)
        one, other = home[:-1][alike], home[1:][alike]
        if self.single:
            one, other = self._single(one, other, cosine[alike], held.shape)
        label = spread(places.flatten(), one, other, early=self.official)
        return label[home], share

    def _single(self, one: Tensor, other: Tensor, cosine: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Of links between cells ``one [L]`` and ``other [L]`` of the next frame, those of every other cell with the most
        similar one; frames are of the ``shape [F, H, W]``."""
        # one a place; those of a pair of cells are equal
        pair, link = torch.unique(one * shape.numel() + other, return_inverse=True)
        one, other = pair // shape.numel(), pair % shape.numel()
        cosine = cosine.new_zeros(len(pair)).scatter_reduce(0, link, cosine, "amax", include_self=False)
        order = cosine.argsort(descending=True, stable=True)
        by = one // shape[1:].numel() if self.official else other
        order = order[by[order].argsort(stable=True)]
        one, other = one[order], other[order]
        first = torch.ones_like(other, dtype=torch.bool)
        first[1:] = other[1:] != other[:-1]
        return one[first], other[first]

    def _pyramid(self, x: Tensor, held: Tensor) -> list[Level]:
        """From the frames themselves to the coarsest cells."""
        levels = [Level(x, held, torch.ones_like(held))]
        while min(levels[-1].x.shape[1:3]) > 2:
            fine = levels[-1]
            size = fold(fine.held.float()[..., None]).sum((2, 4))
            mean = fold(fine.x * fine.held[..., None]).sum((2, 4)) / size.clamp(min=1)
            cosine = self._cosine(unfold(mean, fine.x.shape), fine.x).masked_fill(~fine.held, torch.inf)
            least = fold(cosine[..., None], torch.inf).amin((2, 4))[..., 0]
            if self.official:
                first = torch.minimum(least, self._cosine(mean, fine.x[:, :1, :1]))
                least = torch.where(size[..., 0] < 4, first, least)
            levels.append(Level(mean, size[..., 0] > 0, least >= self.spatial))
        return levels

    def _split(self, levels: list[Level], held: Tensor) -> Cells:
        """The cells that stay whole, place by place."""
        rows, columns = (side_maps(size, len(levels), held.device) for size in held.shape[1:])
        cells, alive = Cells.none(levels[0].x), None
        share, shares = torch.ones(held.shape, device=held.device), []
        for number, fine in enumerate(levels, 1):
            shares.append(share)
            if number < len(levels):
                parts = fold(fine.held.float()[..., None]).sum((2, 4))[..., 0].clamp(min=1)
                share = share / parts[:, rows[number]][:, :, columns[number]]
        for number in range(max(0, len(levels) - 1 - self.root), -1, -1):
            level, wide = levels[number], (rows[number], columns[number])
            alive = level.held if alive is None else alive & level.held
            whole = (alive & (level.whole | (number == 0)))[:, wide[0]][:, :, wide[1]]
            corner = (first_of(wide[0])[:, None] * held.shape[2] + first_of(wide[1])).expand_as(whole)
            cells.corner[whole], cells.share[whole] = corner[whole], shares[number][whole]
            frame, y, z = whole.nonzero(as_tuple=True)
            cells.x[frame, y, z] = level.x[frame, wide[0][y], wide[1][z]]
            if number:
                alive = unfold((alive & ~level.whole)[..., None], levels[number - 1].x.shape)[..., 0]
        return cells

    def _cosine(self, one: Tensor, other: Tensor) -> Tensor:
        """``[...]``: the cosine of ``[..., D]``, the mean over :attr:`heads` slices."""
        one, other = one.unflatten(-1, (self.heads, -1)), other.unflatten(-1, (self.heads, -1))
        return cosine_of(one, other).clamp(max=1.0).mean(-1)


class Level(NamedTuple):
    """One level of the pyramid: ``x [F, h, w, D]``, which cells hold a token, and which may stay whole, ``[F, h, w]`` bool."""

    x: Tensor
    held: Tensor
    whole: Tensor


class Cells(NamedTuple):
    """Cell of every place: its mean ``x [F, H, W, D]``, its first place in the frame and the weight of the place in it,
    ``[F, H, W]``."""

    x: Tensor
    corner: Tensor
    share: Tensor

    @staticmethod
    def none(x: Tensor) -> Cells:
        """A state without any place."""
        shape = x.shape[:3]
        return Cells(torch.zeros_like(x), torch.zeros(shape, dtype=torch.long, device=x.device), x.new_ones(shape))


def fold(x: Tensor, value: float = 0.0) -> Tensor:
    """``[F, h, w, D]`` -> ``[F, h / 2, 2, w / 2, 2, D]``, where an odd side has ``value`` in front."""
    x = torch.nn.functional.pad(x, (0, 0, x.shape[2] % 2, 0, x.shape[1] % 2, 0), value=value)
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))


def unfold(x: Tensor, shape: torch.Size) -> Tensor:
    """``[F, h / 2, w / 2, D]`` -> ``[F, h, w, D]`` for a ``shape [F, h, w, ...]``: every cell for each of its children."""
    return x.repeat_interleave(2, 1)[:, shape[1] % 2 :].repeat_interleave(2, 2)[:, :, shape[2] % 2 :]


def side_maps(size: int, levels: int, device: torch.device) -> list[Tensor]:
    """For every level ``[size]`` long: the row (or column) of it that each row of a frame lies in."""
    out = [torch.arange(size, device=device)]
    while len(out) < levels:
        out.append((out[-1] + size % 2) // 2)
        size = (size + 1) // 2
    return out


def first_of(rows: Tensor) -> Tensor:
    """``[size]`` long: the first row with the same entry of ``rows [size]``, which ascend."""
    return torch.searchsorted(rows, rows)


def spread(label: Tensor, one: Tensor, other: Tensor, early: bool = False) -> Tensor:
    """The smallest ``label [n]`` of all that are linked, by links ``one [L]`` with ``other [L]``, directly or not.

    ``early`` ends as soon as labels point at labels that stay, as the program does, though links may still join some.
    """
    while True:
        low = torch.minimum(label[one], label[other])
        joined = label.scatter_reduce(0, one, low, "amin").scatter_reduce(0, other, low, "amin")
        jumped = joined[joined]
        settled = joined if early else label
        if torch.equal(jumped, settled):
            return jumped
        label = jumped
