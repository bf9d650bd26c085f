"""Exact confidence bounds of a share of answers, after Clopper and Pearson (1934)."""

from __future__ import annotations

import math

import numpy as np

#: level of the intervals in reports
SHOWN = 0.95
#: halvings of [0, 1] that find a bound to the last digit of a float
_STEPS = 60


def interval(kept: int, asked: int) -> tuple[float, float]:
    """The exact 95 % interval of a share, of which ``kept`` of ``asked`` were seen."""
    tail = (1 - SHOWN) / 2
    return _lower(kept, asked, tail), 1 - _lower(asked - kept, asked, tail)


def lower_bound(kept: int, asked: int, confidence: float) -> float:
    """The one-sided exact lower bound of a share."""
    return _lower(kept, asked, 1 - confidence)


def samples_needed(keep: float, confidence: float) -> int:
    """The fewest questions that can show a share of ``keep``: all of them are kept with a probability of ``1 - confidence`` if
    the true share is ``keep``."""
    return math.ceil(math.log(1 - confidence) / math.log(keep)) if 0 < keep < 1 else 1


def _lower(kept: int, asked: int, tail: float) -> float:
    """The share at which ``kept`` or more of ``asked`` are seen with a probability of ``tail``."""
    if not kept:
        return 0.0
    seen = np.arange(kept, asked + 1)
    ways = [math.lgamma(asked + 1) - math.lgamma(n + 1) - math.lgamma(asked - n + 1) for n in seen.tolist()]
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        share = (low + high) / 2
        chance = np.exp(ways + seen * math.log(share) + (asked - seen) * math.log1p(-share)).sum()
        low, high = (share, high) if chance < tail else (low, share)
    return low
