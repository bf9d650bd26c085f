"""What to decode of a video, checked; nothing here decodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import MmaccelError
from .readers import READERS

Select = Literal["uniform", "keyframes"]
Path_ = str | os.PathLike[str]

GIB = 1 << 30
#: what no machine has, in bytes; what no container says, in frames a second; and longer than anybody waits, in seconds
_MOST = {"memory": 1 << 50, "frames": 1 << 31, "threads": 1024, "fps": 1e6, "folder_fps": 1e6, "start": 1e9, "end": 1e9}
_PATIENCE = 1e6


@dataclass(frozen=True)
class DecodeSpec:
    """What to decode; the options of :func:`mmaccel.video.decode`."""

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
                    f"{name}={shortened(value)} makes no clip; give a whole number from 1 to {_MOST[name]:,}."
                )
        for name, least in {"fps": 0.0, "folder_fps": 0.0, "start": -1.0, "end": -1.0}.items():
            value = getattr(self, name)
            if (value is not None or name in ("folder_fps", "start")) and (
                not _number(value) or not least < value <= _MOST[name]
            ):
                raise MmaccelError(
                    f"{name}={shortened(value)} makes no clip; give a number{' above 0' * (least == 0)}, at most "
                    f"{_MOST[name]:,.0f}."
                )
        if self.select not in ("uniform", "keyframes"):
            raise MmaccelError(f"select={self.select!r} is unknown; use 'uniform' or 'keyframes'.")
        if self.select == "keyframes" and (self.frames is None or self.fps is not None):
            raise MmaccelError("select='keyframes' needs frames=, and no fps=.")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise MmaccelError(f"start={self.start} and end={self.end} leave nothing; give seconds, 0 <= start < end.")
        if self.backend is not None and self.backend not in list(READERS):
            raise MmaccelError(f"There is no back end {self.backend!r}; use {', '.join(READERS)}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shortened(value: Any) -> str:
    """A value as a sentence names it, however long it is; Python refuses to write out very large numbers."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(a number of {value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_timeout(timeout: float) -> float:
    """Return ``timeout`` if it is seconds that a clock can wait.

    Raises
    ------
    MmaccelError
        If it is not.
    """
    if not _number(timeout) or not 0 < timeout <= _PATIENCE:
        raise MmaccelError(
            f"timeout={shortened(timeout)} is no time to decode in; give seconds above 0, at most {_PATIENCE:,.0f}."
        )
    return timeout
