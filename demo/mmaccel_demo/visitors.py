"""State of one visitor, forgotten when the visitor leaves: the answer that runs, the drawings, the stream he follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mmaccel import MmaccelError, Recipe, VideoSession
from mmaccel.media.files import Clip

from .engine import Engine
from .overlay import View

#: visitors that are remembered, streams at once, and seconds after which a stream that nobody follows is forgotten
VISITORS, STREAMS, IDLE = 64, 4, 60.0


class Live:
    """A clip that comes as if it were live, over and over, and the session that follows it.

    Parameters
    ----------
    clip : what comes.
    cap : keys that each head of a layer may hold.
    chunk : frames that are read at once, and that :meth:`step` pushes.
    """

    def __init__(self, engine: Engine, recipe: Recipe, clip: Clip, cap: int, chunk: int = 4) -> None:
        fps = len(clip.frames) / clip.duration
        self.engine, self.clip, self.cap, self.chunk = engine, clip, cap, chunk
        self.session = VideoSession(
            engine.model, recipe, processor=engine.processor, cap_tokens=cap, fps=fps, chunk=chunk
        )
        self.next = 0
        #: (frames read, bytes held, keys a head), behind every step
        self.points: list[tuple[int, int, int]] = []

    def step(self) -> np.ndarray:
        """Push the next frames; returns the last of them, ``[H, W, 3]`` uint8."""
        at = [(self.next + i) % len(self.clip.frames) for i in range(self.chunk)]
        with self.engine.turn():
            self.session.push(self.clip.frames[at])
            self.points.append((self.session.frames, self.session.nbytes(), self.session.tokens()))
        self.next += self.chunk
        frame: np.ndarray = self.clip.frames[at[-1]]
        return frame

    def ask(self, question: str, longest: int) -> str:
        """The answer to a question about all that came so far."""
        with self.engine.turn():
            return self.session.ask(question, longest)


@dataclass
class Visitor:
    """One browser tab, or one client of the API.

    asked : questions so far; only the last of them is answered.
    stop : ends the answer to that one.
    shown : end the answers to the examples that the visitor is shown unasked.
    waits : it waits in the queue.
    starting : a placeholder of the stream that is about to start; another, or None, once the visitor wants that no more.
    """

    asked: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    shown: list[threading.Event] = field(default_factory=list)
    waits: bool = False
    views: dict[str, View | None] = field(default_factory=dict)
    live: Live | None = None
    starting: object = None
    seen: float = field(default_factory=time.monotonic)

    def begin(self) -> int:
        """The number of a new question; the one before is stopped, whether it waits or is answered."""
        self.halt()
        self.stop, self.waits = threading.Event(), True
        self.asked += 1
        return self.asked

    def show(self) -> threading.Event:
        """The event that stops the answer to an example: its own, since whatever ends sets its event."""
        self.shown = [one for one in self.shown if not one.is_set()] + [stop := threading.Event()]
        return stop

    def halt(self) -> None:
        """Stop whatever is answered."""
        for stop in (self.stop, *self.shown):
            stop.set()

    def turn(self, number: int) -> threading.Event:
        """The event that stops question ``number``, whose turn it is; already set if another came after it, or if the
        visitor left."""
        if number == self.asked:
            self.waits = False
            return self.stop
        past = threading.Event()
        past.set()
        return past


class Visitors:
    """All of them, by what the server calls their sessions."""

    def __init__(self) -> None:
        self._all: dict[str, Visitor] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: str) -> Visitor:
        with self._lock:
            visitor = self._all.pop(key, None) or Visitor()
            visitor.seen = time.monotonic()
            # the latest stands last; who has been away longest is forgotten
            self._all[key] = visitor
            while len(self._all) > VISITORS:
                self._forget(next(iter(self._all)))
            return visitor

    def __len__(self) -> int:
        return len(self._all)

    def leave(self, key: str) -> None:
        """Stop what runs for a visitor and forget him."""
        with self._lock:
            self._forget(key)

    def _forget(self, key: str) -> None:
        visitor = self._all.pop(key, None)
        if visitor is not None:
            visitor.halt()
            visitor.live = visitor.starting = None

    def room(self, visitor: Visitor) -> None:
        """Make sure that one more stream may begin.

        Raises
        ------
        MmaccelError
            If too many run.
        """
        with self._lock:
            for one in self._streaming():
                if time.monotonic() - one.seen > IDLE:
                    one.live = None
            if sum(one is not visitor for one in self._streaming()) >= STREAMS:
                raise MmaccelError(f"{STREAMS} streams are being followed already; try again when one has ended.")

    def _streaming(self) -> Iterator[Visitor]:
        return (one for one in self._all.values() if one.live is not None)
