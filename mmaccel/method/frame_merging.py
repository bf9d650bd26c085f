"""Base of methods that merge whole frames of a clip inside the vision tower."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ..errors import UnsupportedError
from .base import Method, ModelFacts, closed_to_clips


class FrameMergingMethod(Method):
    """Fewer frames of a clip, from one layer of the vision tower to the next; see :mod:`mmaccel.runtime.tower.frame_merging`.

    A merged frame takes the place of its first source, and the language model reads the tokens of the frames that are left.
    The content decides how many, so it has no budget; pictures are left as they are.

    Examples
    --------
    >>> class Pairs(FrameMergingMethod):
    ...     '''Halfway, every two frames become their mean.'''
    ...
    ...     name = "pairs"
    ...
    ...     def depths(self):
    ...         return (0.5,)
    ...
    ...     def merge(self, frames):
    ...         number = torch.arange(len(frames), device=frames.device)
    ...         member = (number[::2, None] == number // 2 * 2).float()
    ...         return member / member.sum(1, keepdim=True)
    """

    site = "encoder"
    excludes = {"encoder": "a recipe has at most one method at site 'encoder'"}
    budget = "none"
    default_retain = None

    def suits(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` when :meth:`check` does, or the tower is not shown clips as such."""
        if (why := closed_to_clips(family)) is not None:
            raise UnsupportedError(
                f"{self.name} merges frames between the layers of the vision tower, and that of {family.name} {why}; use "
                "'dycoke-ttm' or another method that reduces clips behind it."
            )
        self.check(family)

    @abstractmethod
    def depths(self) -> Sequence[float]:
        """The layers of the tower behind which frames merge, as :class:`mmaccel.method.Tap` counts them; those behind the last
        layer that is read count as this one."""

    @abstractmethod
    def merge(self, frames: Tensor) -> Tensor:
        """``[T', T]`` float32: the weight of each frame in each that stays, which takes the place of its first source (weight
        above 0). These places ascend.

        ``frames [T, P, C]`` float32 are the patches of the frames of one clip that are left, without CLS tokens.
        """
