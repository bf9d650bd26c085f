"""Draw a reduction over its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .picture import load_picture

if TYPE_CHECKING:
    from ..core.layout import Segment
    from ..core.reduction import Reduction

#: Okabe and Ito's colours, which remain apart for colour-blind readers (without black)
_COLOURS = np.array(
    [[230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0], [204, 121, 167]]
)


def overlay(image: Image.Image, grid: tuple[int, int], owner: Tensor) -> Image.Image:
    """The picture with dropped cells dark, cells that stay alone untouched and merged groups tinted and outlined.

    Parameters
    ----------
    image : any size and mode; the result is RGB, upright.
    grid : (height, width) in cells.
    owner : ``[height * width]`` long, for every cell in raster order the cell it flows into; -1 where it was dropped.
        A group has the colour of its place in the grid, whatever else is kept.
    """
    height, width = grid
    owners = owner.detach().cpu().numpy().astype(np.int64).reshape(height, width)
    pixels = np.asarray(load_picture(image)).astype(np.float32)
    rows = np.arange(pixels.shape[0]) * height // pixels.shape[0]
    columns = np.arange(pixels.shape[1]) * width // pixels.shape[1]

    # neighbouring groups differ in colour: one step along a row is 1, one along a column 3, of 7
    colours = _COLOURS[(owners // width * 3 + owners % width) % len(_COLOURS)]
    _, group, size = np.unique(owners, return_inverse=True, return_counts=True)
    merged = (size[group.reshape(-1)].reshape(owners.shape) > 1) & (owners >= 0)

    big = owners[rows][:, columns]
    tint = merged[rows][:, columns]
    colour = colours[rows][:, columns].astype(np.float32)
    edge = tint & _border(big, max(1, min(pixels.shape[0] // height, pixels.shape[1] // width) // 12))
    strength = np.where(edge, 1.0, np.where(tint, 0.25, 0.0))[..., None]
    out = pixels * (1.0 - strength) + colour * strength
    out[big < 0] *= 0.25
    return Image.fromarray(out.round().clip(0, 255).astype(np.uint8))


def kept(image: Image.Image, segment: Segment, reduction: Reduction, frame: int = 0) -> Image.Image:
    """:func:`overlay` for one segment of a prompt, as ``model.mmaccel.layout`` and ``model.mmaccel.reduction`` tell it.

    Parameters
    ----------
    image : what the segment shows, or one frame of it.
    frame : which slice of a clip's grid to draw.
    """
    _, height, width = segment.tile.grid
    owner = reduction.owner()[segment.row].cpu()
    t, row, column = segment.tile.cells.T
    here = (t == frame) & (row >= 0)
    cell = torch.full_like(owner, -1)
    cell[segment.places[here]] = (row * width + column)[here]
    # a token of another frame has no cell here: what was merged into it is drawn as a group of its own
    lost, outside = owner < 0, height * width + owner
    target = torch.where(lost, -1, torch.where(cell[owner.clamp(min=0)] >= 0, cell[owner.clamp(min=0)], outside))
    drawn = torch.full((height * width,), -1)
    drawn[cell[segment.places[here]]] = target[segment.places[here]]
    return overlay(image, (height, width), drawn)


def _border(groups: np.ndarray, thick: int) -> np.ndarray:
    """Pixels at most ``thick`` away, along a row or column, from another group or from the picture's edge."""
    height, width = groups.shape
    wide = np.pad(groups, thick, constant_values=-2)
    edge = np.zeros(groups.shape, dtype=bool)
    for step in range(1, thick + 1):
        for down, right in ((step, 0), (-step, 0), (0, step), (0, -step)):
            beside = wide[thick + down : thick + down + height, thick + right : thick + right + width]
            edge |= beside != groups
    return edge
