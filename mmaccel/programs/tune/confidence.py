"""How sure a share of kept answers is, and how many questions it takes to be so sure."""

from __future__ import annotations

import math

#: of the interval that is shown beside every final figure
SHOWN = 0.95


def interval(kept: int, asked: int, level: float = SHOWN) -> tuple[float, float]:
    """The exact interval (Clopper and Pearson 1934) of a share of which ``kept`` of ``asked`` were seen."""
    tail = (1 - level) / 2
    return lower(kept, asked, 1 - tail), 1 - lower(asked - kept, asked, 1 - tail)


def lower(kept: int, asked: int, confidence: float) -> float:
    """The share above which the true one is with this confidence, one-sided: where seeing ``kept`` or more of ``asked`` has a
    probability of one minus it."""
    if not kept:
        return 0.0
    low, high = 0.0, kept / asked
    for _ in range(60):
        middle = (low + high) / 2
        if _at_least(kept, asked, middle) > 1 - confidence:
            high = middle
        else:
            low = middle
    return low


def needed(keep: float, confidence: float) -> int:
    """The fewest questions that can show a share of ``keep`` with a confidence: as many as may all be kept by chance of
    ``1 - confidence`` where the true share is ``keep``."""
    return math.ceil(math.log(1 - confidence) / math.log(keep)) if 0 < keep < 1 else 1


def _at_least(kept: int, asked: int, share: float) -> float:
    """The probability of ``kept`` or more of ``asked``; the tail that is shorter is added up, in logarithms."""
    if not 0 < share < 1:
        return float(share >= 1)

    def term(seen: int) -> float:
        ways = math.lgamma(asked + 1) - math.lgamma(seen + 1) - math.lgamma(asked - seen + 1)
        return math.exp(ways + seen * math.log(share) + (asked - seen) * math.log1p(-share))

    return math.fsum(term(seen) for seen in range(kept, asked + 1))
