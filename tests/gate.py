"""A model that is held in the middle of its work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Gate:
    """While it is entered, a model stops before its ``at``-th forward pass until ``open()``; ``passes`` counts them.

    What a visitor does meanwhile meets the model in a state that cannot pass by, however fast the machine is.
    """

    def __init__(self, model: Any, at: int, then: Callable[[], None] = lambda: None) -> None:
        self.model, self.at, self.then = model, at, then
        self.passes = 0
        self.reached, self._opened = threading.Event(), threading.Event()
        self.open = self._opened.set

    def _pass(self, *about: Any) -> None:
        self.passes += 1
        if self.passes == self.at:
            self.then()
            self.reached.set()
            assert self._opened.wait(300), "nobody opened the gate"

    def __enter__(self) -> Gate:
        self._hook = self.model.register_forward_pre_hook(self._pass)
        return self

    def __exit__(self, *about: Any) -> None:
        self.open()
        self._hook.remove()
