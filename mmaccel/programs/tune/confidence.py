"""Confidence bounds of a share of kept answers."""

from __future__ import annotations

import math

#: level of the intervals in reports
SHOWN = 0.95


def interval(kept: int, asked: int, level: float = SHOWN) -> tuple[float, float]:
    """The exact interval (Clopper and Pearson 1934) of a share, of which ``kept`` of ``asked`` were seen."""
    tail = (1 - level) / 2
    return lower_bound(kept, asked, 1 - tail), 1 - lower_bound(asked - kept, asked, 1 - tail)


def lower_bound(kept: int, asked: int, confidence: float) -> float:
    """The one-sided lower bound of a share: where ``kept`` or more of ``asked`` have a probability of ``1 - confidence``."""
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


def samples_needed(keep: float, confidence: float) -> int:
    """The fewest questions that can show a share of ``keep``: all of them are kept with a probability of ``1 - confidence`` if
    the true share is ``keep``."""
    return math.ceil(math.log(1 - confidence) / math.log(keep)) if 0 < keep < 1 else 1


def _at_least(kept: int, asked: int, share: float) -> float:
    """The probability of ``kept`` or more of ``asked``, from terms in logarithms."""
    if not 0 < share < 1:
        return float(share >= 1)

    def term(seen: int) -> float:
        ways = math.lgamma(asked + 1) - math.lgamma(seen + 1) - math.lgamma(asked - seen + 1)
        return math.exp(ways + seen * math.log(share) + (asked - seen) * math.log1p(-share))

    return math.fsum(term(seen) for seen in range(kept, asked + 1))
