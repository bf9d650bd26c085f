"""Confidence bounds of a share of kept answers."""

from __future__ import annotations

import math
from typing import Any

from ...errors import MmaccelError

#: level of the intervals in reports
SHOWN = 0.95


def interval(kept: int, asked: int) -> tuple[float, float]:
    """The exact 95 % interval (Clopper and Pearson 1934) of a share, of which ``kept`` of ``asked`` were seen."""
    low, high = _test(kept, asked, "two-sided").proportion_ci(SHOWN)
    return float(low), float(high)


def lower_bound(kept: int, asked: int, confidence: float) -> float:
    """The one-sided exact lower bound of a share."""
    return float(_test(kept, asked, "greater").proportion_ci(confidence).low)


def samples_needed(keep: float, confidence: float) -> int:
    """The fewest questions that can show a share of ``keep``: all of them are kept with a probability of ``1 - confidence`` if
    the true share is ``keep``."""
    return math.ceil(math.log(1 - confidence) / math.log(keep)) if 0 < keep < 1 else 1


def _test(kept: int, asked: int, alternative: str) -> Any:
    try:
        from scipy.stats import binomtest
    except ImportError:
        raise MmaccelError("Confidence intervals need scipy; run: pip install 'mmaccel[tune]'.") from None
    return binomtest(kept, asked, alternative=alternative)
