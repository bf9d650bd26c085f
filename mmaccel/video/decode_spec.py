"""Options of decoding, validated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import MmaccelError
from .readers import READERS

Select = Literal["uniform", "keyframes"]
Path_ = str | os.PathLike[str]

GIB = 1 << 30
#: upper limits: bytes, counts, frames a second, seconds
_MOST = {"memory": 1 << 50, "frames": 1 << 31, "threads": 1024, "fps": 1e6, "folder_fps": 1e6, "start": 1e9, "end": 1e9}
_PATIENCE = 1e6


@dataclass(frozen=True)
class DecodeSpec:
    """Decode options of a video; those of :func:`mmaccel.video.decode`."""

    frames: int | None = 16
    fps: float | None = None
    select: Select = "uniform"
    start: float = 0.0
    end: float | None = None
    folder_fps: float = 1.0
    backend: str | None = None
    threads: int | None = None
    memory: int = 4 * GIB

    def __post_init__(self) -> None:
        if self.frames is None and self.fps is None:
            raise MmaccelError("Say how many frames to decode: frames=16, or fps=1.0 for one a second.")
        for name in ("frames", "threads", "memory"):
            value = getattr(self, name)
            if (value is not None or name == "memory") and (
                not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST[name]
            ):
                raise MmaccelError(
                    f"`{name}` must be a whole number from 1 to {_MOST[name]:,}, got {shortened(value)}."
                )
        for name, least in {"fps": 0.0, "folder_fps": 0.0, "start": -1.0, "end": -1.0}.items():
            value = getattr(self, name)
            if (value is not None or name in ("folder_fps", "start")) and (
                not _number(value) or not least < value <= _MOST[name]
            ):
                raise MmaccelError(
                    f"`{name}` must be a number of {'more than 0' if least == 0 else 'at least 0'} and at most "
                    f"{_MOST[name]:,.0f}, got {shortened(value)}."
                )
        if self.select not in ("uniform", "keyframes"):
            raise MmaccelError(f"`select` must be 'uniform' or 'keyframes', got {self.select!r}.")
        if self.select == "keyframes" and (self.frames is None or self.fps is not None):
            raise MmaccelError("select='keyframes' needs frames=, and no fps=.")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise MmaccelError(
                f"`start` and `end` must be seconds with 0 <= start < end, got {self.start} and {self.end}."
            )
        if self.backend is not None and self.backend not in list(READERS):
            raise MmaccelError(f"`backend` must be one of {', '.join(READERS)}, got {self.backend!r}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shortened(value: Any) -> str:
    """A value for an error message, shortened; Python refuses to print very large numbers."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(a number of {value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_timeout(timeout: float) -> float:
    """Validate a timeout in seconds and return it."""
    if not _number(timeout) or not 0 < timeout <= _PATIENCE:
        raise MmaccelError(
            f"`timeout` must be more than 0 and at most {_PATIENCE:,.0f} seconds, got {shortened(timeout)}."
        )
    return timeout
