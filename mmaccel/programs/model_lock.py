"""A model that answers one call at a time: turns at it, what ends one, when its tokens came, and twins for several at once."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import MmaccelError

#: see :func:`model_lock`; by the model, which it does not keep
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()

#: intervals between tokens from which a rate is told
_INTERVALS = 3


def model_lock(model: Any) -> threading.RLock:
    """The lock to hold while a recipe is on ``model`` for a while: two threads would undo each other's recipes. A thread that
    holds it may take it again."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())


class Stopped(Exception):
    """Nobody wants more of this answer."""


class TimeLimitExceeded(MmaccelError):
    """What one question is given is used up."""


class TokenTimer:
    """A streamer that notes when tokens arrive. The first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Tokens on the CPU: the device has finished them."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""

    def rate(self) -> float | None:
        """Tokens a second behind the first; None of so few that one of them would decide."""
        intervals = len(self.times) - 2
        return intervals / (self.times[-1] - self.times[1]) if intervals >= _INTERVALS else None


class ModelSlot:
    """One model with its processor, which answers one question at a time: a recipe hangs on the model itself.

    model, processor : of a supported family, ready to generate.
    seconds : that the model works for one question.
    """

    def __init__(self, model: Any, processor: Any, seconds: float) -> None:
        self.model, self.processor, self.seconds = model, processor, seconds
        self.lock = threading.Lock()

    def twin(self) -> tuple[Any, Any]:
        """Another model with the same weights, on which other recipes may hang, and a processor of its own. The model must be
        bare."""
        weights = {id(x): x for x in self.model.parameters()}
        return copy.deepcopy(self.model, weights), copy.deepcopy(self.processor)

    @contextmanager
    def turn(self, stop: threading.Event | None = None) -> Iterator[Callable[[], None]]:
        """The model for one question, once it is free.

        What comes back ends the work, by an exception, when ``stop`` is set or the time is over. It is called between the
        blocks of the model, in the tower and in the language model, and so also between the stages of a recipe. Of a decode
        step that is replayed as one launch it is not, so a streamer must call it too.

        Raises Stopped, TimeLimitExceeded inside if it is to end.
        """
        with self.lock:
            end = time.monotonic() + self.seconds

            def look(*about: Any) -> None:
                if stop is not None and stop.is_set():
                    raise Stopped
                if time.monotonic() > end:
                    raise TimeLimitExceeded(
                        f"The model worked for {self.seconds:g} seconds, which is all that one question is given here; ask "
                        "for a shorter answer, or for less at once."
                    )

            lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
            handles = [block.register_forward_pre_hook(look) for blocks in lists for block in blocks]
            try:
                yield look
            finally:
                for handle in handles:
                    handle.remove()
