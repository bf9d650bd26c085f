"""Units of one or several tiles, with signals of the tower: what the selectors between tower and language model are given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.method import TokenBatch

#: segments (t, h, w, newlines) of every unit: images, a clip, a base image with stitched tiles, a unit of one token
UNITS = [
    [(1, 6, 6, False)],
    [(2, 3, 4, False)],
    [(1, 4, 4, False), (1, 8, 6, True)],
    [(1, 1, 1, False)],
    [(1, 3, 3, False), (1, 3, 3, False), (1, 3, 3, False)],
    [(1, 4, 5, True)],
]
COUNTS = torch.tensor([9, 5, 21, 1, 10, 7])


def batch_of(units=UNITS, seed: int = 0, width: int = 12) -> TokenBatch:
    random = torch.Generator().manual_seed(seed)
    cells, segments = [], []
    for unit in units:
        mine = [
            (i, (f, r, c) if c < w else (-1, -1, -1))
            for i, (t, h, w, newline) in enumerate(unit)
            for f in range(t)
            for r in range(h)
            for c in range(w + newline)
        ]
        segments.append(torch.tensor([i for i, _ in mine]))
        cells.append(torch.tensor([cell for _, cell in mine]))
    n = max(map(len, segments))
    cell = torch.stack([torch.cat([c, c.new_full((n - len(c), 3), -1)]) for c in cells])
    segment = torch.stack([torch.cat([s, s.new_full((n - len(s),), -1)]) for s in segments])
    blank = (cell < 0).any(-1)[:, None]

    def noise(*shape: int) -> Tensor:
        # row by row, so that a unit has the same numbers in any batch
        return torch.stack([torch.randn(*shape, generator=random) for _ in units])

    attention = (2 * noise(2, n)).softmax(-1).masked_fill(blank, torch.nan)
    vectors = {name: noise(1, n, 6).masked_fill(blank[..., None], torch.nan) for name in ("keys", "features")}
    vectors["shift"] = vectors["features"][..., :1].abs()
    first_pass = {name: noise(n) for name in ("prompt_match", "text_peak", "draft_match")}
    return TokenBatch(
        features=noise(n, width),
        valid=segment >= 0,
        cells=cell,
        grid=torch.tensor([[max(s[i] for s in unit) for i in range(3)] for unit in units]),
        segment=segment,
        question=noise(5, width),
        question_valid=torch.arange(5) < torch.arange(len(units))[:, None],
        signals={"cls_attention": attention, "received_attention": attention.flip(1), **vectors, **first_pass},
    )


def row_of(tokens: TokenBatch, row: int) -> TokenBatch:
    n, one = int(tokens.valid[row].sum()), slice(row, row + 1)
    assert tokens.question is not None and tokens.question_valid is not None
    return TokenBatch(
        features=tokens.features[one, :n],
        valid=tokens.valid[one, :n],
        cells=tokens.cells[one, :n],
        grid=tokens.grid[one],
        segment=tokens.segment[one, :n],
        tile=tokens.tile[one, :n],
        tiles=tokens.tiles[one],
        question=tokens.question[one],
        question_valid=tokens.question_valid[one],
        signals={name: x[one, :n] if x.dim() == 2 else x[one, :, :n] for name, x in tokens.signals.items()},
    )


def slots(mask: Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


def tiled(h: int, w: int, hot: list[tuple[int, int]], top: int = 0, side: int = 4) -> TokenBatch:
    """A base image whose ``hot`` cells have early attention, and a stitched grid of ``h`` x ``w`` cells, before which (and
    behind which) ``top`` rows of padding were cut off."""
    tokens = batch_of([[(1, side, side, False), (1, h, w, True)]])
    early = torch.zeros(tokens.valid.shape[1])
    early[[r * side + c for r, c in hot]] = 1.0
    late = tokens.signals["cls_attention"][:, 1]
    row, col = tokens.cells[..., 1], tokens.cells[..., 2]
    rows, cols = (h + 2 * top) // side, w // side
    tile = (1 + (row + top) // side * cols + col // side).masked_fill(tokens.segment == 0, 0)
    return replace(
        tokens,
        tile=tile.masked_fill(row < 0, 0),
        tiles=torch.tensor([1 + rows * cols]),
        signals={"cls_attention": torch.stack([early[None], late], 1)},
    )


def by_tile(kept: Tensor, tokens: TokenBatch) -> list[int]:
    """Kept tokens of the base image, and of every tile in reading order."""
    mine = kept[0] & (tokens.cells[0] >= 0).all(-1)
    return [int((mine & (tokens.tile[0] == i)).sum()) for i in range(int(tokens.tiles))]
