"""Decode a video, in this process or in a subprocess."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from .choice import length, shown
from .clip import Clip
from .decode_spec import GIB, DecodeSpec, Path_, Select
from .in_process import decode_in_process
from .readers import READERS, Reader
from .subprocess_decoder import decode_in_subprocess


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
    """Decode frames of a local video file or of a folder of pictures.

    decord is tried first, then torchcodec, then PyAV; :attr:`Clip.backend` says which it was, and a back end that is
    missing or fails leaves one warning. Only the stretches between the keyframes around the wanted frames are decoded.

    Parameters
    ----------
    path : a file that begins as mp4, mov, 3gp, mkv, webm, avi, gif, ts, mpg, flv, wmv, ogv, mxf, y4m or ivf, whatever it is
        called, or a folder of pictures. Addresses and playlists are refused.
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
        If the file does not exist, is not a readable video, or breaks off; if no back end is installed; or if time or
        memory do not suffice.
    """
    spec = DecodeSpec(frames, fps, select, start, end, folder_fps, backend, threads, memory)
    if isolated:
        return decode_in_subprocess(path, spec, timeout)
    return decode_in_process(path, spec, list(READERS), lambda name: None)


def decode_sampled(path: Path_, sample: Callable[..., Any] | None) -> tuple[np.ndarray, Any]:
    """Frames ``[T, H, W, 3]`` uint8 that a video processor of transformers samples, and their metadata.

    ``sample``, as the processor hands it over, gets ``metadata=`` and returns indices, which may repeat; None takes all frames.
    Indices are taken as times, which makes a difference with a variable frame rate only.
    """
    from transformers.video_utils import VideoMetadata

    wanted = np.zeros(0, dtype=np.int64)

    def choose(reader: Reader) -> np.ndarray:
        nonlocal wanted
        times, fps = reader.timestamps, reader.fps
        total, seconds = len(times), length(times, fps)
        if sample is None:
            wanted = np.arange(total)
        else:
            about = VideoMetadata(total_num_frames=total, fps=fps, duration=seconds, video_backend=reader.name)
            wanted = shown(times, fps, np.asarray(sample(metadata=about)) / fps)
        return np.unique(wanted)

    clip = decode_in_process(path, DecodeSpec(), list(READERS), lambda name: None, choose)
    places = np.searchsorted(clip.indices, wanted)
    whole = dataclasses.replace(clip, frames=clip.frames[places], timestamps=clip.timestamps[places])
    return whole.frames, whole.metadata()
