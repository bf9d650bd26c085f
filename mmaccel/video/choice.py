"""Frame selection: indices of the frames to decode, from the times at which frames are shown."""

from __future__ import annotations

import numpy as np

#: seconds; containers round times
_FUZZ = 1e-6


def spaced(total: int, count: int) -> list[int]:
    """At most ``count`` of ``total`` frames, each in the middle of its stretch."""
    count = min(total, count)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def constant(timestamps: np.ndarray, fps: float) -> bool:
    """Whether frame ``i`` of ``timestamps [N]`` is shown at ``i / fps``, up to rounding by the container."""
    return bool(np.abs(timestamps - np.arange(len(timestamps)) / fps).max() <= 0.5 / fps)


def length(timestamps: np.ndarray, fps: float) -> float:
    """Duration of the frames in seconds."""
    return len(timestamps) / fps if constant(timestamps, fps) else float(timestamps[-1]) + 1 / fps


def shown(timestamps: np.ndarray, fps: float, times: np.ndarray) -> np.ndarray:
    """Frames ``[T]`` int64 shown at ``times [T]`` of a video whose frames begin at ``timestamps [N]``; all in seconds.

    Where the rate is constant, times that the container has rounded do not matter.
    """
    if constant(timestamps, fps):
        frames = np.floor(times * fps + _FUZZ)
    else:
        frames = timestamps.searchsorted(times + _FUZZ, "right") - 1
    return np.clip(frames, 0, len(timestamps) - 1).astype(np.int64)


def uniform(timestamps: np.ndarray, fps: float, count: int, start: float, end: float) -> np.ndarray:
    """Ascending indices of at most ``count`` frames between ``start`` and ``end``, each in the middle of its stretch."""
    middles = start + (2 * np.arange(count) + 1) * (end - start) / (2 * count)
    return np.unique(shown(timestamps, fps, middles))


def at_rate(timestamps: np.ndarray, fps: float, wanted: float, start: float, end: float) -> np.ndarray:
    """Ascending indices of the frames shown at ``start``, ``start + 1 / wanted``, ... before ``end``."""
    times = start + np.arange(max(1, int(np.ceil((end - start) * wanted - _FUZZ)))) / wanted
    return np.unique(shown(timestamps, fps, times))


def around_keyframes(keyframes: np.ndarray, inside: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of ``count`` of the frames ``inside [N]``, which are consecutive, the ``keyframes [K]`` first.

    Encoders put keyframes where scenes change, and a keyframe is decoded without any other. Of too many, evenly spaced
    ones are taken; of too few, the widest gap gets a frame in its middle until there are enough.
    """
    keys = keyframes[np.isin(keyframes, inside)]
    if len(keys) >= count:
        return keys[spaced(len(keys), count)]
    chosen = sorted({int(inside[0]), *keys.tolist()}) if not len(keys) else keys.tolist()
    edges = [int(inside[0]) - 1, *chosen, int(inside[-1]) + 1]
    while len(edges) - 2 < min(count, len(inside)):
        widest = int(np.argmax(np.diff(edges)))
        edges.insert(widest + 1, (edges[widest] + edges[widest + 1]) // 2)
    return np.asarray(edges[1:-1])
