"""Base of methods that reuse a vision tower's features of earlier frames."""

from abc import abstractmethod

from torch import Tensor

from ..errors import UnsupportedError
from .base import Method, ModelFacts, closed_to_clips


class ReuseMethod(Method):
    """Reuse between the frames of a clip, inside the vision tower; see :mod:`mmaccel.runtime.tower.frame_reuse`.

    In every layer a part of the tokens of a frame is computed, the others take what attention and MLP gave the tokens at the
    same places of its reference frame, which is computed whole. No token is dropped, and pictures are left as they are; it has
    no budget.

    Examples
    --------
    >>> class ByTurns(ReuseMethod):
    ...     '''The first frame is the reference of all; every other token is computed.'''
    ...
    ...     name = "by-turns"
    ...
    ...     def references(self, frames):
    ...         return [0] * frames
    ...
    ...     def recompute(self, keys, stored):
    ...         return torch.arange(0, keys.shape[1], 2, device=keys.device).expand(len(keys), -1)
    """

    site = "encoder"
    excludes = {"encoder": "a recipe has at most one method at site 'encoder'"}
    budget = "none"
    default_retain = None

    def suits(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` when :meth:`check` does, or the tower is not shown clips as such."""
        if (why := closed_to_clips(family)) is not None:
            raise UnsupportedError(
                f"{self.name} reuses between frames what the vision tower made of them, and that of {family.name} {why}; use "
                "'stc-pruner' or another method that reduces clips behind it."
            )
        self.check(family)

    def conflict(self, other: Method) -> str | None:
        """Refuse methods that need attention or keys of the whole tower, of which this one computes a part."""
        if any(tap.kind != "features" for tap in other.taps()):
            return f"{other.name} looks at the attention inside the vision tower, of which {self.name} computes a part only"
        return super().conflict(other)

    @abstractmethod
    def references(self, frames: int) -> list[int]:
        """The reference of each of the ``frames`` of a clip: itself, or an earlier frame that is its own reference."""

    @abstractmethod
    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        """``[N, u]`` long, ascending: the tokens of ``N`` frames that a layer computes.

        ``keys [N, T, d]`` float32 are the layer's keys of these frames before rotary positions, all heads side by side, and
        ``stored [N, T, d]`` those of their references. A CLS token is the first.
        """
