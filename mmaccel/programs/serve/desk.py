"""Who is answered when: a model or several twins of it, each on a thread of its own, and those who wait for one."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from ..turns import Stopped
from .answering import Answer, Answering
from .asked import Asked
from .errors import Refused


class Job:
    """One request while it waits and is answered; belongs to the event loop that made it.

    news : pieces of the text, then the answer, or the error that ended it.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
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


class Desk:
    """The models, and the queue in front of them, first come, first served.

    Parameters
    ----------
    seats : twins, each of which answers one request at a time.
    waiting : requests that may wait, those included whose bodies are still being sent.
    """

    def __init__(self, seats: Sequence[Answering], waiting: int) -> None:
        self.seats, self.capacity = seats, len(seats) + waiting
        self.present = self.running = 0
        self._free, self._here, self._lock = list(seats), threading.local(), threading.Lock()
        self._jobs: set[Job] = set()
        self._mean, self.closed = 1.0, False
        # a recorded graph belongs to the thread that recorded it, so each has its model for good
        self._pool = ThreadPoolExecutor(len(seats), "mmaccel-serve", self._sit)

    @property
    def waiting(self) -> int:
        """Requests that are here and not answered yet."""
        return self.present - self.running

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one request.

        Raises
        ------
        Refused
            If all are taken, or the server is ending.
        """
        if self.closed:
            raise self.ending()
        if self.present >= self.capacity:
            seconds = str(max(1, math.ceil(self._mean * self.present / len(self.seats))))
            raise Refused(
                429,
                f"{self.present} requests are being answered or wait, which is all that this server takes; try again in "
                f"{seconds} s.",
                "queue_full",
                headers={"retry-after": seconds},
            )
        self.present += 1
        try:
            yield
        finally:
            self.present -= 1

    @contextmanager
    def answered(self, asked: Asked) -> Iterator[Job]:
        """A request in the queue. Behind the block nobody wants its answer any more."""
        job = Job(asked)
        self._jobs.add(job)
        future: Future[None] = self._pool.submit(self._work, job)
        try:
            yield job
        finally:
            job.stop.set()
            future.cancel()
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
        self._pool.shutdown(cancel_futures=True)

    def _sit(self) -> None:
        with self._lock:
            self._here.seat = self._free.pop()

    def _work(self, job: Job) -> None:
        begin = time.monotonic()
        with self._lock:
            self.running += 1
        try:
            if not job.stop.is_set():
                found = self._here.seat.answer(job.asked, job.say, job.stop)
                self._mean += (time.monotonic() - begin - self._mean) / 8
                job.say(found)
        except BaseException as error:
            job.say(error)
        finally:
            with self._lock:
                self.running -= 1
