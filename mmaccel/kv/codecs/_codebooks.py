"""Lloyd-Max levels: the quantiser of one number with the least mean square error."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch

Codebook = Literal["normal", "sphere", "three_sigma"]

#: numbers that a density is tabulated at
_GRID = 1 << 16


@lru_cache(maxsize=128)
def levels(bits: int, channels: int, codebook: Codebook) -> tuple[float, ...]:
    """Positive levels of ``2 ** bits`` for numbers of variance 1, ascending; the others are these with a minus.

    codebook : ``normal``: numbers of N(0, 1). ``sphere``: coordinates of a point of the sphere of radius ``sqrt(channels)``,
        whose density is ``(1 - t^2 / channels)^((channels - 3) / 2)``. ``three_sigma``: N(0, 1) cut at 3.
    """
    end = {"normal": 12.0, "sphere": channels**0.5, "three_sigma": 3.0}[codebook]
    if codebook == "sphere" and channels < 3:
        # the density has no maximum in the middle
        codebook, end = "normal", 12.0
    t = torch.linspace(0, end, _GRID, dtype=torch.float64)
    if codebook == "sphere":
        density = (1 - t.square() / channels).clamp(min=0) ** ((channels - 3) / 2)
    else:
        density = (-t.square() / 2).exp()
    # integrals up to every number of the grid, by trapezoids
    mass, moment = (_integral(x, end / (_GRID - 1)) for x in (density, density * t))
    half = 1 << bits - 1
    found = [(place + 0.5) * min(end, 4.0) / half for place in range(half)]
    for _ in range(2000):
        bounds = torch.tensor([0.0, *((a + b) / 2 for a, b in pairwise(found)), end], dtype=torch.float64)
        at = bounds / end * (_GRID - 1)
        below = at.long().clamp(max=_GRID - 2)
        masses, moments = (torch.lerp(x[below], x[below + 1], at - below).diff() for x in (mass, moment))
        better = (moments / masses).tolist()
        moved, found = max(abs(a - b) for a, b in zip(better, found, strict=True)), better
        if moved < 1e-10:
            break
    return tuple(found)


def _integral(density: torch.Tensor, step: float) -> torch.Tensor:
    return torch.nn.functional.pad((density[1:] + density[:-1]).cumsum(0) * (step / 2), (1, 0))
