"""HiRED: tiles get budgets by early CLS attention over the whole image, tokens stay by late CLS attention in a tile."""

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import group_sizes, top_in_groups
from ..core.reduction import Reduction, top_mask
from ..method import ModelFacts, ProjectorMethod, Tap, TokenBatch, register
from ..method.tokens import Foreseen
from ._shared import on_grid


@register
class HiRED(ProjectorMethod):
    """A fixed budget for a tiled image, distributed over the whole image and its tiles by attention.

    *HiRED: Attention-Guided Token Dropping for Efficient Inference of High-Resolution Vision-Language Models*, AAAI 2025,
    arXiv 2408.10945.

    Of a budget ``B`` the base image (the whole picture as one tile) gets ``int(alpha B)``. The ``int((1 - alpha) n)`` of its
    ``n`` tokens with most CLS attention in the early layer are marked, and the rest of ``B`` is distributed over the tiles in
    proportion to the marks in the area that each covers. In every tile the tokens with most CLS attention in the late
    layer stay. A picture of one tile keeps its best ``B``. In a clip every frame is a tile of equal share, and so is every
    tile of families that do not say where a tile lies in the picture (InternVL).

    ``variant="official"``: the ``i``-th tile covers the ``i``-th run of the base image in raster order, a band of rows, where
    in the paper it covers its rectangle of the picture; budgets are rounded down, so some may be left over (``at_most``).

    Parameters
    ----------
    alpha : the base image's share; the program's default is 0.5.
    early, late : tower layers, counted as Python counts; ``None`` is the one the language model reads. The program uses 0
        and, for CLIP-L, 22.

    Paper and program: the program counts tokens before it crops the padding of the tiles, and loses the
    budget given to padding; here padding has no tokens. Newline tokens are dropped first, as in the program.
    """

    name = "hired"
    summary = "tiles by early CLS attention, tokens by late CLS attention"
    paper = "arXiv 2408.10945"
    official_rounding = "down"
    unit = "picture"
    budget = "at_most"
    default_retain = 0.2
    limits = {"alpha": "[0, 1]"}

    alpha: float = 0.5
    early: int | None = 0
    late: int | None = None

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("cls_attention", (self.early, self.late)),)

    def check(self, family: ModelFacts) -> None:
        self.require_cls(family, "use 'fopru', 'attention-received' or 'divprune'")

    @property
    def foreseen(self) -> Foreseen:
        """Only the program's shares leave some of the budget."""
        return "limit" if self.official else "budget"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``cls_attention [N, 2, n]``, ``segment``, ``cells``, ``count [N]`` -> the best of every tile."""
        early, late = tokens.signals["cls_attention"].float().unbind(1)
        cell = on_grid(tokens)
        part, covered, tiled = _parts(tokens, cell, self.official)
        base = cell & tiled[:, None] & (part == 0)
        covered = covered.masked_fill(~base, 0)
        parts = int(torch.maximum(part, covered).max()) + 1 if part.numel() else 0

        # marks of the base image, counted per tile that covers them
        most = [int(size * (1 - self.alpha)) for size in base.sum(1).tolist()]
        marked = top_mask(early, base, torch.tensor(most, device=base.device))
        marks = group_sizes(covered.masked_fill(~marked, -1), parts).tolist()
        sizes = group_sizes(part.masked_fill(~cell, -1), parts).tolist()
        totals = torch.minimum(count.to(cell.device), tokens.valid.sum(1)).tolist()
        share = [self._budgets(*row) for row in zip(totals, sizes, marks, tiled.tolist(), strict=True)]
        budgets = torch.tensor(share, device=cell.device).reshape(len(share), parts + 1)

        # newline tokens are one more part after the others, and padding ranks last in it
        late = late.masked_fill(~tokens.valid, torch.nan)
        kept = top_in_groups(late, part.masked_fill(~cell, parts), budgets)
        whole = (count.to(cell.device) >= tokens.valid.sum(1))[:, None]
        return Reduction((kept | whole) & tokens.valid, tokens.valid)

    def _budgets(self, total: int, sizes: list[int], marks: list[int], tiled: bool) -> list[int]:
        """How many tokens of each part stay; the last number is for tokens without a cell."""
        room = min(total, sum(sizes))
        if not tiled:
            return [*apportion(room, sizes), total - room]
        full = min(int(room * self.alpha), sizes[0])
        rest = min(room - full, sum(sizes[1:]))
        if not self.official:
            return [room - rest, *apportion(rest, sizes[1:], [float(m) for m in marks[1:]]), total - room]
        # in float32, as the program divides and multiplies before it truncates
        counted = torch.tensor(marks[1:])
        cut = (counted / counted.sum().clamp(min=1) * rest).int().tolist()
        tiles = [min(k, size) for k, size in zip(cut, sizes[1:], strict=True)]
        return [max(full, int(total > 0 and not any(tiles))), *tiles, 0]


def _parts(tokens: TokenBatch, cell: Tensor, bands: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles (or frames) of every picture, as parts.

    Returns ``[N, n]`` long, the part each token belongs to; ``[N, n]`` long, for tokens of a base image the part that covers
    the same area, 0 where none does; and ``[N]`` bool, the pictures that have a base image beside their tiles. A picture of
    two segments in one frame is a base image and its stitched tiles, as in LLaVA-NeXT.
    """
    t, row, col = tokens.cells.masked_fill(~cell[..., None], 0).clamp(min=0).unbind(-1)
    segment, tile = tokens.segment.clamp(min=0), tokens.tile.clamp(min=0)
    first, second = cell & (segment == 0), cell & (segment == 1)
    tiled = (segment.amax(1) == 1) & (t.amax(1) == 0) & first.any(1)
    part = torch.where(tiled[:, None], tile, tile * (t.max() + 1) + t)

    def side(where: Tensor, index: Tensor) -> Tensor:
        return (index + 1).masked_fill(~where, 0).amax(1, keepdim=True).clamp(min=1)

    h0, w0, h, w = side(first, row), side(first, col), side(second, row), side(second, col)
    if not bands:
        # the tile that contains the centre of a base cell, in cells of the stitched grid
        at, room = row * w + col, int((h * w).max())
        tiles = tile.new_zeros(len(tile), room + 1).scatter_(1, torch.where(second, at, room), tile * second)
        tiles[:, room] = 0
        middle = (2 * row + 1) * h // (2 * h0) * w + (2 * col + 1) * w // (2 * w0)
        covered = tiles.gather(1, middle.clamp(max=room))
    else:
        covered = 1 + (row * w0 + col) * (tokens.tiles[:, None].to(row.device) - 1) // (h0 * w0)
    return part.masked_fill(~cell, 0), covered, tiled
