"""Methods on pixels, before the processor; most only choose frames of a clip."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..core.budget import resolve
from .base import Budget, Method
from .refused import described, refuse

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


class FramesMethod(Method):
    """A method at site ``frames``: works on pixels, before the processor. Applied by :func:`mmaccel.prepare`."""

    site = "frames"
    budget: ClassVar[Budget] = "adaptive"
    #: whether ``clip(frames)`` is ``frames[choose(frames)]``, so that frames need not be chosen twice
    only_chooses: ClassVar[bool] = False

    @abstractmethod
    def picture(self, image: PILImage, retain: float) -> PILImage:
        """The picture that replaces ``image``."""

    @abstractmethod
    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """The frames that replace ``frames [T, H, W, 3]`` uint8, a clip."""

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """The ``frames [T, H, W, 3]`` that the result of :meth:`clip` consists of, ``[T']`` ascending; by default all.

        A method that drops frames overrides it, so that time stamps stay correct.
        """
        return np.arange(len(frames))


class FrameChoice(FramesMethod):
    """Base of methods that keep ``retain`` of the frames of a clip, at least one; pictures stay as they are."""

    budget: ClassVar[Budget] = "exact"
    only_chooses = True

    @abstractmethod
    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        """``count`` of ``frames [T, H, W, 3]``, ``0 < count < T``: their indices, ascending."""

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T']`` int64 ascending: the frames that stay."""
        total = len(frames)
        count = resolve(retain, total) if total else 0
        if count >= total:
            return np.arange(total)
        return check_frames(self, "pick()", self.pick(frames, count), total, count)

    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """``[T, H, W, 3]`` uint8 -> ``[T', H, W, 3]``."""
        return frames[self.choose(frames, retain)]

    def picture(self, image: PILImage, retain: float) -> PILImage:
        """The picture, unchanged."""
        return image


def check_frames(method: Method, call: str, result: Any, total: int, count: int | None = None) -> np.ndarray:
    """Validate the ascending indices ``result`` of frames, at least one or ``count`` of ``total``; returns ``[T']`` int64.

    Raises :class:`MmaccelError` if it has not.
    """
    number = "one or more" if count is None else str(count)
    wanted = f"{number} ascending indices of frames from 0 to {total - 1}, each once"
    try:
        indices = np.asarray(result)
    except ValueError:
        indices = np.empty((0, 0))
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
        refuse(method, call, described(indices if isinstance(result, (list, tuple)) else result), wanted)
    if len(indices) == 0 or (count is not None and len(indices) != count):
        refuse(method, call, f"{len(indices)} indices", wanted)
    if indices[0] < 0 or indices[-1] >= total or not (np.diff(indices) > 0).all():
        refuse(method, call, f"the indices {', '.join(map(str, indices[:8]))}{', ...' * (len(indices) > 8)}", wanted)
    return indices.astype(np.int64)
