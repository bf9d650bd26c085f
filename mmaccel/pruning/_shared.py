"""Parts of several selectors: newline tokens are dropped first, and neighbours are found by their cells."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.reduction import top_mask
from ..method import TokenBatch


def on_grid(tokens: TokenBatch) -> Tensor:
    """``[N, n]`` bool: tokens with a cell (not newlines); in a unit without any cells, all valid tokens."""
    return torch.where(tokens.celled.any(1, keepdim=True), tokens.celled, tokens.valid)


def filled(kept: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``kept [N, n]`` bool and, where these are fewer than ``count [N]``, the first other valid slots: a budget larger than
    the number of tokens on the grid is filled up with newline tokens."""
    return kept | top_mask(kept.float(), valid & ~kept, count - kept.sum(1))


def part_of(room: Tensor, part: float) -> Tensor:
    """``[N]`` long: how many of ``room [N]`` tokens a ``part`` is: an int a count, a float a share, rounded half up."""
    return room.clamp(max=part) if isinstance(part, int) else (room * part + 0.5).long()


def beside(tokens: TokenBatch, steps: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """For every one of ``steps`` (rows down, columns right, at most one) the slot of each token's neighbour in its frame,
    ``[N, n]`` long, and which tokens have one, ``[N, n]`` bool."""
    time, row, column = tokens.cells.long().unbind(-1)
    height, width = row.amax() + 3, column.amax() + 3
    # with a margin around every frame of every grid; tokens without a cell have numbers of their own, far below
    frame = tokens.segment.long() * (time.amax() + 1) + time
    number = (frame * height + row + 1) * width + column + 1
    slots = torch.arange(number.shape[1], device=number.device)
    number = torch.where(tokens.celled, number, -3 * width - slots)
    ordered, order = number.sort(dim=1)
    for down, right in steps:
        wanted = number + down * width + right
        at = torch.searchsorted(ordered, wanted).clamp(max=number.shape[1] - 1)
        yield order.gather(1, at), (ordered.gather(1, at) == wanted) & tokens.celled
