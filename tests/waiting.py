"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(there: Callable[[], Any], seconds: float = 60.0, every: float = 0.01) -> Any:
    """The first result of ``there`` that is true; it is called ``every`` so many seconds.

    Raises
    ------
    AssertionError
        If there is none after ``seconds``.
    """
    end = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < end, f"did not happen within {seconds:g} s"
        time.sleep(every)
    return found
