"""Ragged batches of tokens with signals, and what a reduction is when written out: shared by the tests of methods."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.core.reduction import Reduction
from mmaccel.method import TokenBatch, TokenMethod

#: (t, h, w) and the newline tokens behind every row, for each unit of the batch
UNITS = [((1, 6, 6), False), ((2, 3, 4), False), ((1, 4, 5), True), ((1, 1, 1), False), ((3, 2, 5), False)]


def batch_of(units=UNITS, seed: int = 0) -> TokenBatch:
    """A ragged batch with signals; newline tokens have neither a cell nor a source in the tower."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for (t, h, w), newline in units:
        cells = [
            (f, r, c) if c < w else (-1, -1, -1) for f in range(t) for r in range(h) for c in range(w + int(newline))
        ]
        rows.append(torch.tensor(cells))
    n = max(map(len, rows))
    valid = torch.stack([torch.arange(n) < len(row) for row in rows])
    cells = torch.stack([torch.cat([row, row.new_full((n - len(row), 3), -1)]) for row in rows])
    blank = (cells < 0).any(-1)

    def noise(*shape: int) -> Tensor:
        # row by row, so that a unit has the same numbers in any batch
        return torch.stack([torch.rand(*shape, generator=random) for _ in rows])

    attention = noise(2, n).masked_fill(blank[:, None], torch.nan)
    return TokenBatch(
        features=noise(n, 16) - 0.5,
        valid=valid,
        cells=cells,
        grid=torch.tensor([grid for grid, _ in units]),
        segment=torch.zeros_like(valid, dtype=torch.long),
        signals={
            "cls_attention": attention,
            "received_attention": attention,
            "prompt_attention": noise(n),
            "prompt_match": noise(n),
            "text_peak": noise(n),
        },
    )


def row_of(tokens: TokenBatch, row: int) -> TokenBatch:
    """One unit by itself, without padding."""
    n = int(tokens.valid[row].sum())
    question, asked = tokens.question, tokens.question_valid
    return TokenBatch(
        question=None if question is None else question[row : row + 1],
        question_valid=None if asked is None else asked[row : row + 1],
        question_signals={name: value[row : row + 1] for name, value in tokens.question_signals.items()},
        features=tokens.features[row : row + 1, :n],
        valid=tokens.valid[row : row + 1, :n],
        cells=tokens.cells[row : row + 1, :n],
        grid=tokens.grid[row : row + 1],
        segment=tokens.segment[row : row + 1, :n],
        # a figure of every token, of every token in each layer, or a vector of every token in each layer
        signals={
            name: value[row : row + 1, :, :n] if value.dim() > 2 else value[row : row + 1, :n]
            for name, value in tokens.signals.items()
        },
    )


def dense(reduction: Reduction) -> Tensor:
    """``[N, n, n]`` with outputs as rows, in slot coordinates."""
    links, n = reduction.full_links(), reduction.kept.shape[1]
    out = torch.zeros(len(reduction.kept), n, n, dtype=torch.float64)
    out.index_put_((links.batch, links.slot, links.source), links.weight.double(), accumulate=True)
    return out


def check_rows_alone(method: TokenMethod, tokens: TokenBatch, count: Tensor) -> None:
    """Every row of the batch is reduced as it is alone."""
    together = method.reduce(tokens, count)
    for row in range(len(count)):
        alone = method.reduce(row_of(tokens, row), count[row : row + 1])
        n = alone.kept.shape[1]
        assert torch.equal(together.kept[row, :n], alone.kept[0])
        assert torch.equal(dense(together)[row, :n, :n], dense(alone)[0])
