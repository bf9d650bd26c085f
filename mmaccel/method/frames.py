"""Methods on pixels, before the processor."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from .base import Method

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PILImage


class FramesMethod(Method):
    """A method at site ``frames``: works on pixels, before the processor. Applied by :func:`mmaccel.prepare`."""

    site = "frames"
    budget: ClassVar[Literal["exact", "at_most", "adaptive", "none"]] = "adaptive"
    #: what :meth:`clip` makes is ``frames[choose(frames)]``, and need not be made twice
    only_chooses: ClassVar[bool] = False

    @abstractmethod
    def picture(self, image: PILImage, retain: float) -> PILImage:
        """One picture."""

    @abstractmethod
    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """The frames of one clip, ``[T, H, W, 3]`` uint8."""

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """Which of ``frames [T, H, W, 3]`` the result of :meth:`clip` shows, ``[T']`` ascending; by default all.

        A method that drops frames overrides it, so that time stamps stay right.
        """
        import numpy as np

        return np.arange(len(frames))
