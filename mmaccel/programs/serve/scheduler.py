"""Who is answered when: a model or several twins of it, each on a thread of its own, and those who wait for one."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..model_lock import Stopped
from .engine import Answer, Engine
from .errors import Refused, refusal
from .schema import ChatRequest

#: bytes of the bodies of all requests that are here
HELD = 512 << 20


class Job:
    """One request while it waits and is answered; belongs to the event loop that made it.

    news : pieces of the text, then the answer, or the error that ended it.
    """

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.stop = threading.Event()
        self.news: asyncio.Queue[str | Answer | BaseException] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def say(self, what: str | Answer | BaseException) -> None:
        """From any thread."""
        # the loop of a server that has ended takes no more
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.news.put_nowait, what)

    def end(self) -> None:
        """Nobody wants the answer any more."""
        self.stop.set()
        self.say(Stopped())


class Reservation:
    """Of one request among those that are answered or wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.size = 0

    def hold(self, size: int) -> None:
        """Note that the body of the request has ``size`` bytes so far.

        Raises
        ------
        Refused
            If all bodies together have more than is held here.
        """
        self._scheduler.held += size - self.size
        self.size = size
        if self._scheduler.held > HELD:
            raise self._scheduler.full(
                f"The requests that are here have {HELD >> 20} MiB, which is all that this server holds"
            )


class Scheduler:
    """The models, and the queue in front of them, first come, first served.

    Parameters
    ----------
    engines : twins, each of which answers one request at a time.
    waiting : requests that may wait, those included whose large bodies are still being sent.
    """

    def __init__(self, engines: Sequence[Engine], waiting: int) -> None:
        self.engines, self.capacity = engines, len(engines) + waiting
        self.present = self.running = self.held = 0
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._jobs: set[Job] = set()
        self._mean, self.closed = 1.0, False
        # a recorded graph belongs to the thread that recorded it, so each has its model for good
        self._threads = [threading.Thread(target=self._run_engine, args=(engine,), daemon=True) for engine in engines]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Requests that are here and not answered yet."""
        # a engine may still be at work for a client that left
        return max(0, self.present - self.running)

    @contextmanager
    def place(self) -> Iterator[Reservation]:
        """A place for one request.

        Raises
        ------
        Refused
            If all are taken, or the server is ending.
        """
        if self.closed:
            raise self.ending()
        if self.present >= self.capacity:
            raise self.full(f"{self.present} requests are being answered or wait, which is all that this server takes")
        self.present += 1
        place = Reservation(self)
        try:
            yield place
        finally:
            self.present -= 1
            self.held -= place.size

    def full(self, reason: str) -> Refused:
        """What is said to those for whom there is no room now."""
        seconds = str(max(1, math.ceil(self._mean * self.present / len(self.engines))))
        return Refused(429, f"{reason}; try again in {seconds} s.", "queue_full", headers={"retry-after": seconds})

    @contextmanager
    def answered(self, request: ChatRequest) -> Iterator[Job]:
        """A request in the queue. Behind the block nobody wants its answer any more."""
        job = Job(request)
        self._jobs.add(job)
        with self._lock:
            self._queue.append(job)
            self._work.notify()
        try:
            yield job
        finally:
            job.stop.set()
            with self._lock, suppress(ValueError):
                # nothing is kept of those who left, however long the engines are taken
                self._queue.remove(job)
            self._jobs.discard(job)

    @staticmethod
    def ending() -> Refused:
        """What is said to those who come, or still wait, when the server ends."""
        return Refused(503, "The server is shutting down.", "shutting_down", headers={"retry-after": "10"})

    def close(self) -> None:
        """End all that still runs, and wait for it."""
        self.closed = True
        for job in list(self._jobs):
            job.end()
        with self._lock:
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run_engine(self, engine: Engine) -> None:
        while True:
            with self._lock:
                while not self._queue and not self.closed:
                    self._work.wait()
                if self.closed:
                    return
                job = self._queue.popleft()
                self.running += 1
            try:
                self._answer(engine, job)
            finally:
                # while it waits, a thread holds nothing of the last request
                del job
                with self._lock:
                    self.running -= 1

    def _answer(self, engine: Engine, job: Job) -> None:
        begin = time.monotonic()
        try:
            found = engine.answer(job.request, job.say, job.stop)
            self._mean += (time.monotonic() - begin - self._mean) / 8
            job.say(found)
        except Stopped:
            job.say(Stopped())
        except BaseException as error:
            # a traceback keeps what was sent alive, and is for faults of ours
            job.say(refusal(error) or error)
