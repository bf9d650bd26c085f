"""Decode a long video in groups of frames, so that the pixels of all its frames never exist at once."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..errors import MmaccelError
from .clip import Clip
from .decode import decode
from .decode_spec import GIB, Path_

#: frames of a group, by default
AT_ONCE = 64


class FrameGroups:
    """The frames of one video in groups, each a :class:`Clip`; the next group is decoded while the caller works on one.

    Parameters
    ----------
    path : as for :func:`decode`.
    frames : how many frames, evenly spaced, the same as :func:`decode` gives; a shorter video gives all that it has.
    fps : frames a second, instead of ``frames``.
    at_once : frames of a group at most; two groups are in memory at a time.
    memory : bytes that the frames of both may take; with large frames groups are smaller than ``at_once``.
    isolated, timeout : as for :func:`decode`; the timeout holds for each group.

    Attributes
    ----------
    count : frames of all groups together. rate : frames a second. backend : what decoded the first frame.

    Raises
    ------
    MmaccelError
        As :func:`decode`, and if both ``frames`` and ``fps`` are given, or ``at_once`` is not a whole number of at least 1.
    """

    def __init__(
        self,
        path: Path_,
        frames: int | None = None,
        *,
        fps: float | None = None,
        at_once: int = AT_ONCE,
        memory: int = 4 * GIB,
        isolated: bool = False,
        timeout: float = 120.0,
    ) -> None:
        if frames is not None and fps is not None:
            raise MmaccelError(f"Give `frames` or `fps`, not both, got frames={frames!r} and fps={fps!r}.")
        if not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1:
            raise MmaccelError(f"`at_once` must be a whole number of at least 1, got {at_once!r:.40}.")
        self.path, self.fps = path, fps
        self._options: dict[str, Any] = {"memory": memory, "isolated": isolated, "timeout": timeout}
        # validates what is asked, and tells the length of the video and the size of its frames
        first = decode(path, frames, fps=fps, end=1e-3, **self._options)
        self.count, self.every = min(frames or first.total, first.total), frames is not None and frames >= first.total
        if fps is not None:
            self.count = max(1, math.ceil(first.duration * fps - 1e-6))
        self.backend = first.backend
        self.rate = fps or self.count / first.duration
        self.at_once = max(1, min(at_once, memory // (2 * first.frames[0].nbytes)))

    def __iter__(self) -> Iterator[Clip]:
        last = -1
        with ThreadPoolExecutor(1) as pool:
            jobs = [pool.submit(self._decode, 0)]
            for begin in range(0, self.count, self.at_once):
                clip = jobs.pop().result()
                if begin + self.at_once < self.count:
                    jobs.append(pool.submit(self._decode, begin + self.at_once))
                # the frame that is on show when a stretch begins may be the last one of the stretch before, and of a variable
                # rate a stretch may have more frames than others
                first, last = bisect(clip.indices, last), clip.indices[-1]
                for at in range(first, len(clip.indices), self.at_once):
                    yield _part(clip, slice(at, at + self.at_once))

    def _decode(self, begin: int) -> Clip:
        """The frames from number ``begin`` on."""
        count = min(self.at_once, self.count - begin)
        end = None if begin + count == self.count else (begin + count) / self.rate
        frames = None if self.fps is not None else self.count if self.every else count
        return decode(self.path, frames, fps=self.fps, start=begin / self.rate, end=end, **self._options)


def _part(clip: Clip, part: slice) -> Clip:
    indices, times = clip.indices[part], clip.timestamps[part]
    return (
        clip
        if len(indices) == len(clip.indices)
        else replace(clip, frames=clip.frames[part], indices=indices, timestamps=times)
    )
