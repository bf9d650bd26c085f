"""MustDrop's vision stage: windows of the grid whose patches are alike become one token."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import group_sizes, ranks
from ..core.reduction import Reduction
from ..method import ProjectorMethod, Tap, TokenBatch, register
from ..method.tokens import by_row


@register
class MustDropMerge(ProjectorMethod):
    """Average square windows of neighbouring patches whose hidden states are similar early in the tower.

    *Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model*, arXiv 2411.10803; its first
    stage. (The second drops tokens between layers of the language model, see the recipe ``mustdrop``.)

    The grid is cut into windows of ``window x window`` cells. The similarity of a window is the mean cosine of all pairs of
    its patches, after tower layer ``layer``. Windows with a similarity of at least ``threshold`` become the plain mean of
    their tokens, in the slot of the first one; all other tokens stay. The weights of a merged token sum to one.

    ``retain`` is an upper limit: where more tokens than the budget are left, the next most similar windows are merged too.
    With all of them merged, about ``1 / window^2`` of the tokens is left; a lower limit is not met.

    Parameters
    ----------
    threshold : 0.8 as in the program; above 1 only ``retain`` decides.
    window : cells along a side, 3 as in the program for 24 x 24 patches.
    layer : tower layer, counted as Python counts; 0 as in the program.

    Paper and program: the program merges inside the tower, after layer 0, and all later layers run on fewer tokens; here
    the outputs of the projector are merged, so the tower takes as long as before. In the program all tiles of a picture
    merge as many windows as the tile with fewest; here each tile decides by itself. It refuses grids that the window does
    not divide; here windows that are cut by an edge, or have lost a token to an earlier stage, stay as they are. Every
    frame is reduced like a picture. Newlines stay.
    """

    name = "mustdrop-merge"
    summary = "windows of the grid whose patches are alike averaged (adaptive)"
    paper = "arXiv 2411.10803"
    unit = "tile"
    budget = "adaptive"
    conserves_mass = True
    default_retain = 1.0
    limits = {"window": "[2, inf)"}

    threshold: float = 0.8
    window: int = 3
    layer: int = 0

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("features", (self.layer,)),)

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, 1, n, d]`` of the tower, ``cells [N, n, 3]``, ``count [N]`` (a limit) -> windows and other tokens."""
        slots, full = windows(tokens, self.window)
        similar = window_similarity(tokens.signals["features"][:, 0], slots)
        alike = (full & (similar >= self.threshold)).sum(1)
        # every window that is merged removes all its tokens but one
        excess = tokens.valid.sum(1) - count.to(alike.device)
        over = -(-excess.clamp(min=0) // (self.window**2 - 1))
        wanted = tokens.valid & (count > 0).to(alike.device)[:, None]
        merged = merge_windows(wanted, slots, full, similar, torch.maximum(alike, over))
        return Reduction(merged.kept, tokens.valid, merged.links)


def windows(tokens: TokenBatch, side: int) -> tuple[Tensor, Tensor]:
    """The complete windows of ``side x side`` cells: their slots ``[N, W, side^2]`` long, ascending, and ``[N, W]`` bool,
    False for padding."""
    here, frames = tokens.celled, int(tokens.grid[:, 0].max())
    time, row, column = tokens.cells.masked_fill(~here[..., None], 0).unbind(-1)
    down, across = (int(x.max()) // side + 1 for x in (row, column))
    key = ((tokens.tile * frames + time) * down + row // side) * across + column // side
    sizes = group_sizes(key.masked_fill(~here, -1), int(key.masked_fill(~here, 0).max()) + 1)
    full = here & (sizes.gather(1, key.masked_fill(~here, 0)) == side**2)
    number = full.sum(1) // side**2
    most = int(number.max()) if len(number) else 0
    order = key.masked_fill(~full, sizes.shape[1]).argsort(dim=1, stable=True)[:, : most * side**2]
    return order.view(len(order), most, side**2), torch.arange(most, device=number.device) < number[:, None]


def window_similarity(x: Tensor, slots: Tensor) -> Tensor:
    """``[N, W]`` float32: the mean cosine of all pairs of ``x [N, n, d]`` within the windows ``slots [N, W, m]``."""
    rows = torch.arange(len(x), device=x.device)[:, None, None]
    normed = normalize(x.float(), dim=-1)[rows, slots]
    size = slots.shape[2]
    # the square of the sum contains every pair twice, and each vector with itself
    similar = (normed.sum(2).square().sum(-1) - normed.square().sum((2, 3))) / (size * (size - 1))
    # windows of copies tie, whatever is rounded
    return similar.clamp(max=1.0).masked_fill((normed - normed[:, :, :1]).abs().amax((2, 3)) == 0, 1.0)


def merge_windows(valid: Tensor, slots: Tensor, full: Tensor, similar: Tensor, most: Tensor) -> Reduction:
    """Average the ``most [N]`` most similar windows, the first on a tie; all other ``valid [N, n]`` tokens stay."""
    ranked = similar.nan_to_num(nan=-torch.inf).masked_fill(~full, -torch.inf)
    merged = full & (ranks(ranked.argsort(dim=1, descending=True, stable=True)) < most[:, None])
    target = torch.arange(valid.shape[1], device=valid.device).repeat(len(valid), 1)
    row, window = merged.nonzero(as_tuple=True)
    target[row[:, None], slots[row, window]] = slots[row, window, :1]
    return Reduction.merge(target, valid) if len(row) else Reduction.identity(valid)
