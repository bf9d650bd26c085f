"""Decoding: only the frames that are wanted, by the first back end that can, over several threads."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import MmaccelError
from .choice import around_keyframes, at_rate, length, shown, spaced, uniform
from .clip import Clip
from .container import container, local
from .readers import READERS, PicturesReader, Reader, usable
from .readers.base import NotExactError

Select = Literal["uniform", "keyframes"]
Path_ = str | os.PathLike[str]
#: gives room for pictures of the shape ``[T, H, W, 3]``: what takes the picture ``[H, W, 3]`` that it is given at a place
Make = Callable[[tuple[int, ...]], Any]

#: another thread is started for as many frames that must be decoded
_PER_THREAD = 32
#: seconds, less than any frame lasts
_INSTANT = 1e-3
GIB = 1 << 30
#: what no machine has, in bytes; what no container says, in frames a second; and longer than anybody waits, in seconds
_MOST = {"memory": 1 << 50, "frames": 1 << 31, "threads": 1024, "fps": 1e6, "folder_fps": 1e6, "start": 1e9, "end": 1e9}
_PATIENCE = 1e6


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """An array for pictures."""
    return np.empty(shape, dtype=np.uint8)


@dataclass(frozen=True)
class Wanted:
    """What to decode; the options of :func:`decode`."""

    frames: int | None = 16
    fps: float | None = None
    select: Select = "uniform"
    start: float = 0.0
    end: float | None = None
    folder_fps: float = 1.0
    backend: str | None = None
    threads: int | None = None
    memory: int = 4 * GIB

    def __post_init__(self) -> None:
        if self.frames is None and self.fps is None:
            raise MmaccelError("Say how many frames to decode: frames=16, or fps=1.0 for one a second.")
        for name in ("frames", "threads", "memory"):
            value = getattr(self, name)
            if (value is not None or name == "memory") and (
                not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST[name]
            ):
                raise MmaccelError(
                    f"{name}={shortened(value)} makes no clip; give a whole number from 1 to {_MOST[name]:,}."
                )
        for name, least in {"fps": 0.0, "folder_fps": 0.0, "start": -1.0, "end": -1.0}.items():
            value = getattr(self, name)
            if (value is not None or name in ("folder_fps", "start")) and (
                not _number(value) or not least < value <= _MOST[name]
            ):
                raise MmaccelError(
                    f"{name}={shortened(value)} makes no clip; give a number{' above 0' * (least == 0)}, at most "
                    f"{_MOST[name]:,.0f}."
                )
        if self.select not in ("uniform", "keyframes"):
            raise MmaccelError(f"select={self.select!r} is unknown; use 'uniform' or 'keyframes'.")
        if self.select == "keyframes" and (self.frames is None or self.fps is not None):
            raise MmaccelError("select='keyframes' needs frames=, and no fps=.")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise MmaccelError(f"start={self.start} and end={self.end} leave nothing; give seconds, 0 <= start < end.")
        if self.backend is not None and self.backend not in list(READERS):
            raise MmaccelError(f"There is no back end {self.backend!r}; use {', '.join(READERS)}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shortened(value: Any) -> str:
    """A value as a sentence names it, however long it is; Python refuses to write out very large numbers."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(a number of {value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_timeout(timeout: float) -> float:
    """Return ``timeout`` if it is seconds that a clock can wait.

    Raises
    ------
    MmaccelError
        If it is not.
    """
    if not _number(timeout) or not 0 < timeout <= _PATIENCE:
        raise MmaccelError(
            f"timeout={shortened(timeout)} is no time to decode in; give seconds above 0, at most {_PATIENCE:,.0f}."
        )
    return timeout


def decode(
    path: Path_,
    frames: int | None = 16,
    *,
    fps: float | None = None,
    select: Select = "uniform",
    start: float = 0.0,
    end: float | None = None,
    folder_fps: float = 1.0,
    backend: str | None = None,
    threads: int | None = None,
    memory: int = 4 * GIB,
    isolated: bool = False,
    timeout: float = 120.0,
) -> Clip:
    """Frames of a local video file, or of a folder of pictures, and when they are shown.

    decord is tried first, then torchcodec, then PyAV; :attr:`Clip.backend` says which it was, and a back end that is
    missing or fails leaves one warning. Only the stretches between the keyframes around the wanted frames are decoded.

    Parameters
    ----------
    path : mp4, mov, mkv, webm, avi, gif, ts, mpg, flv, wmv or ogv, or a folder. Addresses and playlists are refused.
    frames : how many frames, or at most how many with ``fps``; a shorter video gives all that it has.
    fps : frames a second of playing time, from ``start`` on. If that makes more than ``frames``, they are evenly spaced.
    select : ``uniform``, evenly spaced in time; ``keyframes``, those of the container first (they are cheap to decode, and
        encoders put them where scenes change), and frames in the widest gaps if there are fewer than ``frames``.
    start, end : seconds from the first frame; by default all.
    folder_fps : pictures a second in a folder.
    backend : ``decord``, ``torchcodec`` or ``pyav``: this one or none.
    threads : to decode with, by default up to four; each works on stretches of its own.
    memory : bytes that the frames may take; an isolated process may have half a GiB more to decode them.
    isolated : decode in a process of its own, which is stopped when it takes longer or more than it may. A file that
        makes a decoder crash or hang then costs an error. The first call starts the process, later ones use it again.
    timeout : seconds that an isolated process may take for the video.

    Returns
    -------
    The frames, ``[T, H, W, 3]`` uint8 RGB, turned upright, with their true times.

    Raises
    ------
    MmaccelError
        If there is no such file, it is not what it should be, broken, or breaks off; if no back end is installed; or if
        time or memory do not suffice.
    """
    wanted = Wanted(frames, fps, select, start, end, folder_fps, backend, threads, memory)
    if isolated:
        from .isolated import decode_isolated

        return decode_isolated(path, wanted, timeout)
    return decode_here(path, wanted, list(READERS), lambda name: None)


def decode_sampled(path: Path_, sample: Callable[..., Any] | None) -> tuple[np.ndarray, Any]:
    """What a video processor of transformers samples, ``[T, H, W, 3]`` uint8, and its metadata.

    Parameters
    ----------
    sample : as the processor hands it over, or None for all frames: gets ``metadata=`` and returns indices. They are taken
        as times, which makes a difference with a variable frame rate only, and may repeat.
    """
    wanted = np.zeros(0, dtype=np.int64)

    def choose(reader: Reader, path: Path, _: Wanted) -> np.ndarray:
        nonlocal wanted
        times, fps = reader.timestamps, reader.fps
        if sample is None:
            wanted = np.arange(len(times))
        else:
            about = VideoMetadata(
                total_num_frames=len(times), fps=fps, duration=length(times, fps), video_backend=reader.name
            )
            sampled = np.asarray(sample(metadata=about))
            wanted = shown(times, fps, sampled / fps)
        return np.unique(wanted)

    from transformers.video_utils import VideoMetadata

    clip = decode_here(path, Wanted(), list(READERS), lambda name: None, choose)
    places = np.searchsorted(clip.indices, wanted)
    whole = dataclasses.replace(clip, frames=clip.frames[places], timestamps=clip.timestamps[places])
    return whole.frames, whole.metadata()


def decode_here(
    path: Path_,
    wanted: Wanted,
    names: Sequence[str],
    trying: Callable[[str], None],
    choose: Callable[[Reader, Path, Wanted], np.ndarray] | None = None,
    make: Make = empty,
) -> Clip:
    """In this process, by the back ends ``names``; ``trying`` is told each before it is tried.

    ``choose`` gives the frames to decode, ``[T]`` ascending; by default ``wanted`` does. What ``make`` gives is filled, and
    comes back as the clip's frames.
    """
    choose = choose or _choose
    file = local(path)
    if file.is_dir():
        trying(PicturesReader.name)
        return _read(PicturesReader(file, "", wanted.folder_fps), file, wanted, choose, make)
    kind = container(file)
    failed: list[str] = []
    error: Exception | None = None
    for name in [wanted.backend] if wanted.backend else names:
        trying(name)
        if not usable(READERS[name]):
            failed.append(f"{name} is not installed or does not load")
            continue
        try:
            clip = _read(READERS[name](file, kind), file, wanted, choose, make)
        except _NoRemedy:
            raise
        except MemoryError as caught:
            raise MmaccelError(
                f"Decoding {str(path)!r} needs more memory than it may have; ask for fewer frames, or give a larger memory=."
            ) from caught
        except Exception as caught:
            error = max(caught, error, key=_telling)
            reason = _first_line(caught)
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
        needed = " ".join(READERS[wanted.backend or "pyav"].distributions)
        raise MmaccelError(
            f"Reading video files needs {wanted.backend or 'PyAV, decord or torchcodec'}; run: pip install {needed}"
        )
    raise MmaccelError(
        f"The video {str(path)!r} is broken or no video ({_first_line(error)}); play or convert it first."
    ) from error


class _NoRemedy(MmaccelError):
    """What no other back end would do better."""


def _telling(error: Exception | None) -> int:
    """How much an error says about a video: ours say more than those of the back ends, and refusals nothing."""
    if error is None:
        return 0
    return 1 if isinstance(error, NotExactError) else 3 if isinstance(error, MmaccelError) else 2


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    # decord puts its clock and source file in front
    return line.split(": ", 1)[-1][:200] if line.startswith("[") else line[:200] or type(error).__name__


def _read(
    reader: Reader, path: Path, wanted: Wanted, choose: Callable[[Reader, Path, Wanted], np.ndarray], make: Make
) -> Clip:
    indices = choose(reader, path, wanted).tolist()
    times, frames = _frames(reader, indices, wanted, path, make)
    return Clip(frames, indices, len(reader.timestamps), reader.fps, times, reader.name)


def _choose(reader: Reader, path: Path, wanted: Wanted) -> np.ndarray:
    """``[T]`` int64 ascending: which frames to decode."""
    times, fps = reader.timestamps, reader.fps
    seconds = length(times, fps)
    end = seconds if wanted.end is None else min(wanted.end, seconds)
    if wanted.start >= seconds:
        raise _NoRemedy(
            f"The video {str(path)!r} is {seconds:.1f} seconds long, and start={wanted.start} is behind it."
        )
    # the frame that is on show when the stretch begins belongs to it, one that begins when it ends does not
    first, last = shown(times, fps, np.asarray([wanted.start, max(wanted.start, end - _INSTANT)]))
    inside = np.arange(first, last + 1)
    if wanted.select == "keyframes" and wanted.frames is not None:
        return around_keyframes(reader.keyframes, inside, wanted.frames)
    if wanted.fps is not None:
        chosen = at_rate(times, fps, wanted.fps, wanted.start, end)
        if wanted.frames is None or len(chosen) <= wanted.frames:
            return chosen
    assert wanted.frames is not None
    if wanted.frames >= len(inside):
        return inside
    return uniform(times, fps, wanted.frames, wanted.start, end)


def _frames(
    reader: Reader, indices: list[int], wanted: Wanted, path: Path, make: Make
) -> tuple[np.ndarray, np.ndarray]:
    """Times ``[T]`` and frames ``[T, H, W, 3]``, by threads that each have stretches between keyframes to themselves."""
    times, out = np.zeros(len(indices)), _Frames(len(indices), wanted.memory, path, make)
    parts = _parts(indices, reader.keyframes, wanted.threads or min(4, os.cpu_count() or 1))

    def work(part: range, own: Reader) -> None:
        for at, (time, picture) in zip(part, own.frames([indices[i] for i in part]), strict=True):
            times[at] = time
            out.put(at, picture)

    if len(parts) == 1:
        work(parts[0], reader)
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            jobs = [pool.submit(lambda p: work(p, reader.twin()), part) for part in parts[1:]]
            work(parts[0], reader)
            for job in jobs:
                job.result()
    assert out.array is not None
    return times, out.array


def _parts(indices: list[int], keyframes: np.ndarray, threads: int) -> list[range]:
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
    """What all threads fill; made when the first picture tells its size."""

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


__all__ = ["Clip", "Wanted", "check_timeout", "decode", "decode_here", "decode_sampled", "empty", "shortened", "spaced"]
