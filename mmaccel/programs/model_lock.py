"""One call of a model at a time: its lock, time limits, times of tokens, and copies for calls at the same time."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from ..errors import MmaccelError

#: of :func:`model_lock`, by the model, which is not kept alive
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()

#: intervals between tokens that a rate needs
_INTERVALS = 3


def model_lock(model: Any) -> threading.RLock:
    """The reentrant lock of a model: two threads would undo each other's recipes."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())


class Stopped(Exception):
    """The client has left."""


class Flag(Protocol):
    """A signal that stops a run, such as a ``threading.Event``."""

    def is_set(self) -> bool:
        """Whether it is."""


class TimeLimitExceeded(MmaccelError):
    """The time limit of one question is exceeded."""


class TokenTimer:
    """A streamer that notes when tokens arrive. The prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Note the time; the device has finished the tokens."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""

    def rate(self) -> float | None:
        """Tokens a second after the first one; None for a few tokens."""
        intervals = len(self.times) - 2
        return intervals / (self.times[-1] - self.times[1]) if intervals >= _INTERVALS else None


class ModelSlot:
    """A model with its processor that answers one question at a time, in ``seconds`` at most: a recipe hangs on the model."""

    def __init__(self, model: Any, processor: Any, seconds: float) -> None:
        self.model, self.processor, self.seconds = model, processor, seconds
        self.lock = threading.Lock()

    def twin(self) -> tuple[Any, Any]:
        """A copy of the bare model that shares its weights and may have other recipes, and a copy of the processor."""
        weights = {id(x): x for x in self.model.parameters()}
        return copy.deepcopy(self.model, weights), copy.deepcopy(self.processor)

    @contextmanager
    def turn(self, stop: Flag | None = None) -> Iterator[Callable[[], None]]:
        """Wait for the model, and use it for one question.

        The block gets a function that raises Stopped when ``stop`` is set, and TimeLimitExceeded when the time is over. The
        blocks of the model call it too, in the tower and in the language model, and so between the stages of a recipe. A
        replayed decode step does not, so a streamer must.
        """
        with self.lock:
            end = time.monotonic() + self.seconds

            def check(*_: Any) -> None:
                if stop is not None and stop.is_set():
                    raise Stopped
                if time.monotonic() > end:
                    raise TimeLimitExceeded(
                        f"The time limit of {self.seconds:g} seconds for one question is over; ask for a shorter answer, or "
                        "show less."
                    )

            lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
            handles = [block.register_forward_pre_hook(check) for blocks in lists for block in blocks]
            try:
                yield check
            finally:
                for handle in handles:
                    handle.remove()
