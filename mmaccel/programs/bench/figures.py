"""Medians, their spread, and when a difference is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: a smaller change is never called one, however steady the samples
LEAST = 0.05


@dataclass(frozen=True)
class Spread:
    """Samples of one figure.

    ``low`` and ``high`` are the notches of a box plot, median +- 1.57 IQR / sqrt(n) (McGill,
    Tukey and Larsen 1978): where those of two figures do not overlap, their medians differ at about the 5% level.
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.samples)

    @property
    def notch(self) -> float:
        """Half the height of the notch."""
        if len(self.samples) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return 1.57 * (third - first) / math.sqrt(len(self.samples))

    @property
    def low(self) -> float:
        """The lower notch."""
        return self.median - self.notch

    @property
    def high(self) -> float:
        """The upper notch."""
        return self.median + self.notch

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"median": self.median, "low": self.low, "high": self.high, "samples": list(self.samples)}

    @staticmethod
    def of(data: dict[str, Any]) -> Spread:
        """Back from JSON."""
        return Spread(tuple(data["samples"]))


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The ratio of every pair of samples, which were taken one after the other."""
    return Spread(tuple(a / b for a, b in zip(above, below, strict=True)))


def verdict(speedup: Spread) -> str:
    """``faster``, ``slower``, or ``same`` when the difference is not beyond noise."""
    return {1: "faster", 0: "same", -1: "slower"}[changed(Spread((1.0,)), speedup)]


def changed(before: Spread, after: Spread) -> int:
    """-1 if ``after`` is lower than ``before`` beyond noise, 1 if it is higher, else 0."""
    if after.high < before.low and after.median < before.median / (1 + LEAST):
        return -1
    if after.low > before.high and after.median > before.median * (1 + LEAST):
        return 1
    return 0
