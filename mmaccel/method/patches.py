"""Base of methods in front of a vision tower: which patches are worth encoding."""

from abc import abstractmethod

from torch import Tensor

from ..errors import UnsupportedError
from .base import Method, TowerFacts


class PatchMethod(Method):
    """A method at site ``patches``: patches that others predict do not enter the vision tower, and the language model
    does not see their tokens. The others keep their positions; see :mod:`mmaccel.runtime.tower.patch_pruning`.

    It has no budget, the pixels decide. Where the projector joins a block of patches to one token, whole blocks are predicted.

    Examples
    --------
    >>> class EvenColumns(PatchMethod):
    ...     '''Every other column is predicted by the one before it.'''
    ...
    ...     name = "even-columns"
    ...
    ...     def predict(self, pixels):
    ...         h, w = pixels.shape[1:3]
    ...         slot = torch.arange(h * w, device=pixels.device)
    ...         return (slot - slot % w % 2).expand(len(pixels), -1)
    """

    site = "patches"
    excludes = {
        "patches": "a recipe has at most one method at site 'patches'",
        "encoder": "either patches are left out of the tower or tokens are merged or reused in it, not both",
    }
    weighable = False
    budget = "none"
    default_retain = None

    def suits(self, family: TowerFacts) -> None:
        """Raise :class:`UnsupportedError` when :meth:`check` does, or the tower needs all of its patches."""
        if family.closed is not None:
            raise UnsupportedError(
                f"{self.name} leaves patches out of the vision tower, and that of {family.name} {family.closed}; use "
                "'divprune' or another method that drops tokens behind it."
            )
        self.check(family)  # type: ignore[arg-type]

    @abstractmethod
    def predict(self, pixels: Tensor) -> Tensor:
        """``[N, h * w]`` long: the slot that each patch (or block of patches) is predicted from, counted in raster order; its
        own for those that are encoded. What predicts is encoded itself.

        ``pixels [N, h, w, d]`` float32 are the pixels of all patches of ``N`` tiles or frames, colours from 0 to 1 up to a
        constant.
        """
