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
    #: whether ``clip(frames)`` is ``frames[choose(frames)]``, so that frames need not be chosen twice
    only_chooses: ClassVar[bool] = False

    @abstractmethod
    def picture(self, image: PILImage, retain: float) -> PILImage:
        """The picture to use in place of ``image``."""

    @abstractmethod
    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """The frames to use in place of ``frames [T, H, W, 3]`` uint8, a clip."""

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """Which of ``frames [T, H, W, 3]`` the result of :meth:`clip` consists of, ``[T']`` ascending; by default all.

        A method that drops frames overrides it, so that time stamps stay correct.
        """
        import numpy as np

        return np.arange(len(frames))
