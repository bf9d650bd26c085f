"""Base of methods by which later layers of a vision tower compute a part of the patches, and rebuild the others."""

from abc import abstractmethod

from torch import Tensor

from ..core.budget import layer_at
from ..errors import UnsupportedError
from .base import Method, ModelFacts


class RebuildingMethod(Method):
    """Fewer patches in later layers of the vision tower, all of them behind it; see :mod:`mmaccel.runtime.tower.rebuilding`.

    At the input of one layer a part of the patches is chosen. For a few layers attention still sees all of them and the MLP
    computes the chosen ones; the layers behind compute the chosen ones alone. Wherever all are needed, a patch that was left
    out is what it was at the choice plus the mean change of its sources since then. The language model reads as many tokens as
    before, so it has no budget. CLS tokens are always computed.

    Examples
    --------
    >>> class Alternating(RebuildingMethod):
    ...     '''Behind the first layer every other patch is computed; the one before it tells how the others change.'''
    ...
    ...     name = "alternating"
    ...
    ...     def span(self, layers):
    ...         return 1, 0
    ...
    ...     def choose(self, before, now):
    ...         return torch.arange(0, len(now), 2, device=now.device)
    ...
    ...     def sources(self, left, chosen):
    ...         return torch.arange(len(left), device=left.device)[:, None]
    """

    site = "encoder"
    excludes = {"encoder": "a recipe has at most one method at site 'encoder'"}
    budget = "none"
    default_retain = None

    def suits(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` when :meth:`check` does, or the layers of the tower are out of reach."""
        if family.closed is not None:
            raise UnsupportedError(
                f"{self.name} chooses patches between the layers of the vision tower, and that of {family.name} "
                f"{family.closed}; use 'divprune' or another method that drops tokens behind it."
            )
        self.check(family)

    @abstractmethod
    def span(self, layers: int) -> tuple[int, int]:
        """The layer (from 0) at whose input patches are chosen, at least 1, and in how many layers from it on attention sees
        all patches; the tower has ``layers`` whose output is read."""

    @abstractmethod
    def choose(self, before: Tensor, now: Tensor) -> Tensor:
        """``[m]`` long, ascending, ``m >= 1``: the patches that later layers compute.

        ``before`` and ``now [n, C]`` float32 are hidden states at the inputs of the layer before the choice and of the one
        at which they are chosen: of a picture or clip whose patches the tower packs into one sequence, else of a tile; in the
        authors' variant those of all pictures of the call.
        """

    @abstractmethod
    def sources(self, left: Tensor, chosen: Tensor) -> Tensor:
        """``[r, k]`` long, ``k >= 1``: rows of ``chosen [m, C]`` whose change each patch of ``left [r, C]`` follows.

        Both are float32 states at the choice.
        """


def depth_of(layer: float, layers: int) -> int:
    """A number of layers, given as one or as a share of ``layers``, cut to 0 .. ``layers``."""
    return min(max(0, layer_at(layer, layers)), layers)
