"""Request scheduling: a queue in front of a model, or of several twins of it, each on a thread of its own."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..model_lock import Stopped
from .batch import Member, alike, answer_together
from .engine import Engine
from .errors import Refused, refusal
from .schema import ChatRequest

#: bytes that the bodies of all accepted requests may have together
HELD = 512 << 20


@dataclass(frozen=True)
class StreamWork:
    """Work of a live stream: ``run`` gets the engine whose turn it is, and what :meth:`Engine.answer` gets beside a request;
    what it returns comes as a :class:`Done`."""

    run: Callable[[Engine, Callable[[str], None], threading.Event], Any]


@dataclass(frozen=True)
class Done:
    """The end of a stream's work, and what it returned."""

    result: Any


class Job:
    """A request from its arrival to its answer; belongs to the event loop that made it. ``events`` has pieces of the text, then
    the answer, or the error that ended it."""

    def __init__(self, request: ChatRequest | StreamWork) -> None:
        self.request = request
        self.stop = threading.Event()
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def send(self, event: Any) -> None:
        """Add an event, from any thread."""
        # the event loop may have ended
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def cancel(self) -> None:
        """Stop the work for a client that has left."""
        self.stop.set()
        self.send(Stopped())


class Reservation:
    """The share of one request in the limits of a server."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.size = 0

    def hold(self, size: int) -> None:
        """Note that the body of the request has ``size`` bytes so far. Raises Refused if all bodies together have more than
        is held here."""
        self._scheduler.held += size - self.size
        self.size = size
        if self._scheduler.held > HELD:
            raise self._scheduler.full(f"The bodies of all requests may have {HELD >> 20} MiB together, and have more")


class Scheduler:
    """A queue in front of ``engines``, each of which answers one request at a time, or up to ``batch`` that wait and are alike;
    first come, first served. So many requests may be ``waiting``, those included whose large bodies are still being
    received."""

    def __init__(self, engines: Sequence[Engine], waiting: int, batch: int = 1) -> None:
        self.engines, self.places, self.batch = engines, waiting, batch
        self.present = self.held = 0
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._jobs: set[Job] = set()
        self._answering: set[Job] = set()
        self._mean, self.closed = 1.0, False
        # a recorded graph belongs to the thread that recorded it, so each has its model for good
        self._threads = [threading.Thread(target=self._run_engine, args=(engine,), daemon=True) for engine in engines]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> int:
        """Requests that the engines are at work for; of a batch, those whose rows go on."""
        return len(self._answering)

    @property
    def waiting(self) -> int:
        """Requests that wait for an engine."""
        # an engine may still be at work for a client that left
        return max(0, self.present - self.running)

    @contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """A place for one request. Raises Refused if the queue is full, or the server is shutting down."""
        if self.closed:
            raise self.ending()
        if self.present >= max(self.running, len(self.engines)) + self.places:
            raise self.full(f"The queue is full with {self.present} requests")
        self.present += 1
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.present -= 1
            self.held -= reservation.size

    def full(self, reason: str) -> Refused:
        """The refusal of a request for which there is no room now."""
        seconds = str(max(1, math.ceil(self._mean * self.present / len(self.engines))))
        return Refused(429, f"{reason}; try again in {seconds} s.", "queue_full", headers={"retry-after": seconds})

    @contextmanager
    def queued(self, request: ChatRequest | StreamWork) -> Iterator[Job]:
        """A request in the queue; leaving the block cancels it. Raises Refused if the server is shutting down."""
        job = Job(request)
        with self._lock:
            # it may have closed while the request was read
            if self.closed:
                raise self.ending()
            self._jobs.add(job)
            self._queue.append(job)
            self._work.notify()
        try:
            yield job
        finally:
            job.stop.set()
            with self._lock, suppress(ValueError):
                self._queue.remove(job)
            self._jobs.discard(job)

    @staticmethod
    def ending() -> Refused:
        """The refusal of a request when the server shuts down."""
        return Refused(503, "The server is shutting down.", "shutting_down", headers={"retry-after": "10"})

    def close(self) -> None:
        """Cancel all requests, and wait for the engines to stop."""
        with self._lock:
            self.closed, jobs = True, list(self._jobs)
            self._work.notify_all()
        for job in jobs:
            job.cancel()
        for thread in self._threads:
            thread.join()

    def _run_engine(self, engine: Engine) -> None:
        while True:
            with self._lock:
                while not self._queue and not self.closed:
                    self._work.wait()
                if self.closed:
                    return
                jobs = self._next()
                self._answering.update(jobs)
            self._answer_all(engine, jobs)
            # while it waits, a thread holds nothing of the last requests
            del jobs

    def _next(self) -> list[Job]:
        """Take the first request out of the queue, and those that may be answered with it."""
        first = self._queue.popleft()
        if self.batch == 1:
            return [first]
        key = _alike(first)
        more = [job for job in self._queue if key is not None and _alike(job) == key][: self.batch - 1]
        for job in more:
            self._queue.remove(job)
        return [first, *more]

    def _answer_all(self, engine: Engine, jobs: list[Job]) -> None:
        """Answer a request, or several as a batch."""
        if len(jobs) == 1:
            return self._answer(engine, jobs[0])
        begin, members = time.monotonic(), list[Member]()
        for job in jobs:
            assert isinstance(job.request, ChatRequest)
            members.append(Member(job.request, job.send, job.stop, partial(self._finish, job)))
        try:
            answer_together(engine, members)
        except BaseException as error:
            for job in jobs:
                self._finish(job, error)
        self._mean += ((time.monotonic() - begin) / len(jobs) - self._mean) / 8

    def _answer(self, engine: Engine, job: Job) -> None:
        begin = time.monotonic()
        try:
            if isinstance(job.request, ChatRequest):
                answer: Any = engine.answer(job.request, job.send, job.stop)
            else:
                answer = Done(job.request.run(engine, job.send, job.stop))
            self._mean += (time.monotonic() - begin - self._mean) / 8
            self._finish(job, answer)
        except BaseException as error:
            self._finish(job, error)

    def _finish(self, job: Job, found: Any) -> None:
        """Send the answer of a request, or the error that ended it, unless that has been done."""
        with self._lock:
            if job not in self._answering:
                return
            self._answering.remove(job)
        job.send(_outcome(found))


def _alike(job: Job) -> Any:
    """The key of :func:`.batch.alike`; None for a job that is answered alone."""
    return alike(job.request) if isinstance(job.request, ChatRequest) else None


def _outcome(found: Any) -> Any:
    """An answer as it is, and of an error what is sent: its traceback keeps the request alive, so only unexpected ones keep
    theirs."""
    if isinstance(found, Stopped):
        return Stopped()
    return (refusal(found) or found) if isinstance(found, BaseException) else found
