"""Prefetch: decode several videos at once, ahead of the caller, within a memory limit."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np

from ..errors import MmaccelError
from .clip import Clip
from .decode_spec import GIB, DecodeSpec, Path_, Select, check_timeout
from .in_process import decode_in_process, empty
from .readers import READERS
from .subprocess_decoder import decode_in_subprocess


class _Cancelled(BaseException):
    """Decoding was cancelled; not an error of the video."""


@dataclass(frozen=True)
class _Pending:
    """A video that is being decoded. ``size``: bytes of its frames, known before they are decoded."""

    number: int
    size: Future[int]
    clip: Future[Clip | MmaccelError]


class Prefetcher:
    """Iterator of clips in the order of their paths, decoded while the caller works on earlier ones; a video that fails
    yields its error.

    The frames that are being decoded, wait, or were handed over and not let go of take at most ``spec.memory`` bytes. They
    get room in the order of the videos: the one that is asked for next never waits for a later one, but, where there is no
    room left, for :meth:`release`. So call that where :meth:`full` says so. ``paths`` are taken as they are needed; for the
    other arguments see :func:`decode_each`.
    """

    def __init__(self, paths: Iterable[Path_], spec: DecodeSpec, workers: int, isolated: bool, timeout: float) -> None:
        self._paths, self._spec, self._most = iter(paths), spec, spec.memory
        self._isolated, self._timeout = isolated, timeout
        self._pending: deque[_Pending] = deque()
        self._begun, self._depth = 0, 2 * workers + 1
        self._pool = ThreadPoolExecutor(workers)
        #: guards all below; notified when memory may be free
        self._room = threading.Condition()
        self._taken: dict[int, int] = {}
        self._turn, self._past = 0, set[int]()
        self._handed: list[int] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._closed = False

    # --- for the caller ---------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Clip | MmaccelError]:
        return self

    def __next__(self) -> Clip | MmaccelError:
        self._fill()
        if not self._pending:
            raise StopIteration
        next_ = self._pending[0]
        clip = next_.clip.result()
        self._pending.popleft()
        self._handed.append(next_.number)
        return clip

    def full(self) -> bool:
        """Whether the caller must :meth:`release` its clips before the next one: together they take more than half of the
        memory. It depends on the videos alone, not on which was decoded first."""
        self._fill()
        with self._room:
            held = sum(self._taken.get(number, 0) for number in self._handed)
        return bool(held and self._pending) and held + self._pending[0].size.result() > self._most // 2

    def release(self) -> None:
        """Free the memory of all clips that were handed over."""
        with self._room:
            for number in self._handed:
                self._taken.pop(number, None)
            self._handed.clear()
            self._room.notify_all()

    def close(self) -> None:
        """Stop; decoders in subprocesses are killed."""
        with self._room:
            self._closed = True
            for process in self._processes.values():
                process.kill()
            self._room.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- decoding ---------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        while len(self._pending) < self._depth and (path := next(self._paths, None)) is not None:
            size: Future[int] = Future()
            clip = self._pool.submit(self._decode, self._begun, path, size)
            self._pending.append(_Pending(self._begun, size, clip))
            self._begun += 1

    def _decode(self, number: int, path: Path_, size: Future[int]) -> Clip | MmaccelError:
        def make(shape: tuple[int, ...]) -> np.ndarray:
            self._take(number, prod(shape), size)
            return empty(shape)

        def begun(process: subprocess.Popen[bytes]) -> None:
            with self._room:
                self._processes[number] = process
                if self._closed:
                    process.kill()
                    raise _Cancelled

        done = False
        try:
            if self._isolated:
                clip = decode_in_subprocess(path, self._spec, self._timeout, make, begun)
            else:
                clip = decode_in_process(path, self._spec, list(READERS), lambda name: None, make=make)
            done = True
            return clip
        except MmaccelError as error:
            return error
        except MemoryError:
            return MmaccelError(f"There is no memory for the frames of {os.fspath(path)!r}; ask for fewer frames.")
        finally:
            with self._room:
                self._processes.pop(number, None)
                self._past.add(number)
                while self._turn in self._past:
                    self._past.remove(self._turn)
                    self._turn += 1
                if not done:
                    self._taken.pop(number, None)
                self._room.notify_all()
            if not size.done():
                size.set_result(0)

    def _take(self, number: int, size: int, known: Future[int]) -> None:
        """Wait for the turn of a video and for memory; a video that has memory already keeps it for the next back end."""
        if not known.done():
            known.set_result(size)
        with self._room:
            while not self._closed and number not in self._taken:
                if self._turn == number and sum(self._taken.values()) + size <= self._most:
                    break
                self._room.wait()
            if self._closed:
                raise _Cancelled
            self._taken[number] = size
            if self._turn == number:
                self._turn += 1
                self._room.notify_all()


def decode_each(
    paths: Iterable[Path_],
    frames: int | None = 16,
    *,
    workers: int = 2,
    isolated: bool = True,
    timeout: float = 120.0,
    threads: int | None = 1,
    fps: float | None = None,
    select: Select = "uniform",
    backend: str | None = None,
    memory: int = 4 * GIB,
) -> Iterator[Clip | MmaccelError]:
    """Decode several videos at once, in order; a video that fails yields its error, and the others go on.

    Parameters
    ----------
    workers : videos that are decoded at a time; as many more wait decoded, while the caller works on one.
    memory : bytes that the frames of all videos may take that are being decoded or wait.
    isolated, ... : as for :func:`decode`, but that each worker has a process of its own by default.

    Raises
    ------
    MmaccelError
        If an option is not valid.
    """
    spec = DecodeSpec(frames, fps, select, backend=backend, threads=threads, memory=memory)
    clips = start_prefetch(paths, spec, workers, isolated, timeout)

    def each() -> Iterator[Clip | MmaccelError]:
        try:
            for clip in clips:
                clips.release()
                yield clip
        finally:
            # the caller may have stopped asking
            clips.close()

    return each()


def start_prefetch(
    paths: Iterable[Path_], spec: DecodeSpec, workers: int, isolated: bool = True, timeout: float = 120.0
) -> Prefetcher:
    """An :class:`Prefetcher`, with validated arguments."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise MmaccelError(f"`workers` must be a whole number of 1 or more, got {workers!r}.")
    if isinstance(paths, (str, os.PathLike)) or not isinstance(paths, Iterable):
        raise MmaccelError(f"`paths` must be a list of videos, got {str(paths)[:80]!r}; for one video give [path].")
    return Prefetcher(paths, spec, workers, isolated, check_timeout(timeout))
