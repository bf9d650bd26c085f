"""Decode in this process: only the frames that are wanted, by the first back end that can, in several threads."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MmaccelError, first_line
from .choice import around_keyframes, at_rate, length, shown, uniform
from .clip import Clip
from .container import container, local
from .decode_spec import GIB, DecodeSpec, Path_
from .readers import READERS, PicturesReader, Reader, no_reader, usable
from .readers.base import NotExactError

#: gives room for pictures of the shape ``[T, H, W, 3]``: what takes the picture ``[H, W, 3]`` that it is given at a place
Make = Callable[[tuple[int, ...]], Any]

#: another thread is started for as many frames that must be decoded
_PER_THREAD = 32
#: seconds, less than any frame lasts
_INSTANT = 1e-3


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """An array for pictures."""
    return np.empty(shape, dtype=np.uint8)


def decode_in_process(
    path: Path_,
    spec: DecodeSpec,
    names: Sequence[str],
    trying: Callable[[str], None],
    choose: Callable[[Reader], np.ndarray] | None = None,
    make: Make = empty,
) -> Clip:
    """Decode in this process by the back ends ``names``; ``trying(name)`` is called before each.

    ``choose`` gives the frames to decode, ``[T]`` ascending; by default ``spec`` does. What ``make`` gives is filled, and
    comes back as the clip's frames.
    """
    file = local(path)

    def read(reader: Reader) -> Clip:
        indices = (_choose(reader, file, spec) if choose is None else choose(reader)).tolist()
        times, frames = _frames(reader, indices, spec, file, make)
        return Clip(frames, indices, len(reader.timestamps), reader.fps, times, reader.name)

    if file.is_dir():
        trying(PicturesReader.name)
        return read(PicturesReader(file, "", spec.folder_fps))
    kind = container(file)
    failed: list[str] = []
    error: Exception | None = None
    for name in [spec.backend] if spec.backend else names:
        trying(name)
        if not usable(READERS[name]):
            failed.append(f"{name} is not installed or does not load")
            continue
        try:
            clip = read(READERS[name](file, kind))
        except _NoRemedy:
            raise
        except MemoryError as caught:
            raise MmaccelError(
                f"Decoding {str(path)!r} needs more memory than it may have; ask for fewer frames, or give a larger memory=."
            ) from caught
        except Exception as caught:
            error = max(caught, error, key=_telling)
            reason = _reason(caught)
            failed.append(reason.split("; ")[0] if isinstance(caught, MmaccelError) else f"{name} failed ({reason})")
            continue
        if failed:
            warnings.warn(f"{str(path)!r} was read by {name}: {'; '.join(failed)}.", stacklevel=3)
        return clip
    if isinstance(error, NotExactError):
        raise MmaccelError(f"The video {str(path)!r} was not read: {error}") from error
    if isinstance(error, MmaccelError):
        raise error
    if error is None:
        raise no_reader(spec.backend)
    raise MmaccelError(
        f"The video {str(path)!r} is not a readable video ({_reason(error)}); convert it to mp4."
    ) from error


class _NoRemedy(MmaccelError):
    """An error that no other back end would avoid."""


def _telling(error: Exception | None) -> int:
    """Rank of an error by its information about the video: ours first, then those of back ends, then refusals."""
    if error is None:
        return 0
    return 1 if isinstance(error, NotExactError) else 3 if isinstance(error, MmaccelError) else 2


def _reason(error: BaseException) -> str:
    line = first_line(error)
    # decord puts its clock and source file in front
    return (line.split(": ", 1)[-1] if line.startswith("[") else line)[:200]


def _choose(reader: Reader, path: Path, spec: DecodeSpec) -> np.ndarray:
    """``[T]`` int64 ascending: which frames to decode."""
    times, fps = reader.timestamps, reader.fps
    seconds = length(times, fps)
    end = seconds if spec.end is None else min(spec.end, seconds)
    if spec.start >= seconds:
        raise _NoRemedy(
            f"`start` must be less than the length of the video {str(path)!r}, {seconds:.1f} seconds, got {spec.start}."
        )
    # the frame that is on show when the stretch begins belongs to it, one that begins when it ends does not
    first, last = shown(times, fps, np.asarray([spec.start, max(spec.start, end - _INSTANT)]))
    inside = np.arange(first, last + 1)
    if spec.select == "keyframes" and spec.frames is not None:
        return around_keyframes(reader.keyframes, inside, spec.frames)
    if spec.fps is not None:
        chosen = at_rate(times, fps, spec.fps, spec.start, end)
        if spec.frames is None or len(chosen) <= spec.frames:
            return chosen
    assert spec.frames is not None
    if spec.frames >= len(inside):
        return inside
    return uniform(times, fps, spec.frames, spec.start, end)


def _frames(
    reader: Reader, indices: list[int], spec: DecodeSpec, path: Path, make: Make
) -> tuple[np.ndarray, np.ndarray]:
    """Times ``[T]`` and frames ``[T, H, W, 3]``, by threads that each have stretches between keyframes to themselves."""
    times, out = np.zeros(len(indices)), _Frames(len(indices), spec.memory, path, make)
    shares = parts(indices, reader.keyframes, spec.threads or min(4, os.cpu_count() or 1))

    def work(part: range, own: Reader) -> None:
        for at, (time, picture) in zip(part, own.frames([indices[i] for i in part]), strict=True):
            times[at] = time
            out.put(at, picture)

    if len(shares) == 1:
        work(shares[0], reader)
    else:
        with ThreadPoolExecutor(len(shares)) as pool:
            jobs = [pool.submit(lambda p: work(p, reader.twin()), part) for part in shares[1:]]
            work(shares[0], reader)
            for job in jobs:
                job.result()
    assert out.array is not None
    return times, out.array


def parts(indices: list[int], keyframes: np.ndarray, threads: int) -> list[range]:
    """Consecutive places of ``indices`` for each thread: about as many frames to decode, cut at keyframes only."""
    key = keyframes[keyframes.searchsorted(indices, "right") - 1]
    before = np.concatenate([[-1], indices[:-1]])
    # from the keyframe on, or from the frame before, which is decoded already
    cost = np.asarray(indices) - np.maximum(before, key - 1)
    done = np.cumsum(cost)
    threads = max(1, min(threads, int(done[-1]) // _PER_THREAD))
    cuts = [0]
    for share in range(1, threads):
        cut = int(done.searchsorted(done[-1] * share / threads)) + 1
        while cut < len(indices) and key[cut] == key[cut - 1]:
            cut += 1
        if cuts[-1] < cut < len(indices):
            cuts.append(cut)
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(indices)], strict=True)]


class _Frames:
    """Output buffer shared by all threads, allocated when the first frame tells its size."""

    def __init__(self, count: int, memory: int, path: Path, make: Make) -> None:
        self._count, self._memory, self._path, self._make = count, memory, path, make
        self._lock = threading.Lock()
        self.array: Any = None

    def put(self, at: int, picture: np.ndarray) -> None:
        """One picture, ``[H, W, 3]``."""
        with self._lock:
            if self.array is None:
                size = self._count * picture.nbytes
                if size > self._memory:
                    raise _NoRemedy(
                        f"{self._count} frames of {str(self._path)!r} ({picture.shape[1]}x{picture.shape[0]}) take "
                        f"{size / GIB:.1f} GiB, more than memory={self._memory / GIB:.1f} GiB; ask for fewer frames, or give "
                        "a larger memory=."
                    )
                self.array = self._make((self._count, *picture.shape))
        self.array[at] = picture
