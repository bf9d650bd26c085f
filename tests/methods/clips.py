"""Clips whose frames resemble each other at some places, so that methods that merge take every branch."""

from __future__ import annotations

from dataclasses import replace

from batches import batch_of

from mmaccel.method import TokenBatch

#: (t, h, w) and whether newline tokens stand behind every row
UNITS = [
    ((9, 3, 4), False),
    ((1, 6, 6), False),
    ((4, 3, 3), True),
    ((1, 4, 5), True),
    ((1, 1, 1), False),
    ((2, 2, 5), False),
    ((17, 1, 2), False),
]


def clips(units=UNITS, seed: int = 0) -> TokenBatch:
    """Units whose frames resemble each other at some places, so that every branch is taken."""
    tokens = batch_of(units, seed)
    features = tokens.features.clone()
    for row, ((t, h, w), _) in enumerate(units):
        still = (tokens.cells[row, :, 2] % 2 == 0) & (tokens.cells[row, :, 0] >= t // 3)
        cell = tokens.cells[row, :, 1] * w + tokens.cells[row, :, 2]
        ground = features[row, : h * w].clone()
        features[row, still] = ground[cell[still] % len(ground)] + 0.1 * features[row, still]
    return replace(tokens, features=features, signals={**tokens.signals, "features": features[:, None]})


def spread_out(tokens: TokenBatch) -> TokenBatch:
    """The same clips with every frame in a segment of its own."""
    frame = tokens.cells[..., 0].clamp(min=0)
    return replace(tokens, segment=frame, tile=frame)
