"""Base of methods that show visual tokens again inside the language model, when it is not sure of its next token."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ..errors import UnsupportedError
from .base import Method, ModelFacts

#: the visual tokens that are shown again
Shown = Literal["all", "dropped"]


class RetracingMethod(Method):
    """A method that changes the MLP of one layer in forwards whose next token is uncertain.

    Behind some layers the model's last norm and output head read the last token of every row early. In the first layer behind
    a read-out that :meth:`is_uncertain` says yes to, :meth:`retrace` changes the output of the MLP, once a forward and row. The
    visual tokens are those of all pictures of the row as they entered the prompt, before any method dropped or merged some; a
    row that has none stays as it is.

    Examples
    --------
    >>> class Nudge(RetracingMethod):
    ...     '''Add the mean visual token to the MLP of the second layer, always.'''
    ...
    ...     name = "nudge"
    ...
    ...     def readouts(self, depth):
    ...         return range(1)
    ...
    ...     def is_uncertain(self, logits):
    ...         return logits.new_ones(len(logits), dtype=torch.bool)
    ...
    ...     def retrace(self, hidden, output, visual, shown, real):
    ...         mean = (visual * shown[..., None]).sum(1) / shown.sum(1, keepdim=True).clamp(min=1)
    ...         return output + mean[:, None]
    """

    site = "layers"
    budget = "none"
    default_retain = None
    shown: Shown = "all"

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: the last token of a prompt decides for all of it."""
        return "changes all tokens of a prompt by what the last one tells"

    def conflict(self, other: Method) -> str | None:
        """Refuse a second one."""
        if isinstance(other, RetracingMethod):
            return "both would change the MLP of the first layer behind an uncertain read-out"
        return super().conflict(other)

    def check(self, family: ModelFacts) -> None:
        """Refuse models in which no layer is read out."""
        # a family as such, of no model, has no layers
        if family.depth and not self.readouts(family.depth):
            raise UnsupportedError(
                f"{self.name} changes a layer behind one that it reads out, and with these options this {family.name} model of "
                f"{family.depth} layers has none; give layers further apart, or leave out the options."
            )

    @abstractmethod
    def readouts(self, depth: int) -> Sequence[int]:
        """The layers, counted from 0, ascending, behind which the next token is read out; never the last of the ``depth``
        layers."""

    @abstractmethod
    def is_uncertain(self, logits: Tensor) -> Tensor:
        """``[B]`` bool: the rows to whose next token, of ``logits [B, V]`` float32, the model is not sure. It may not wait for
        the device."""

    @abstractmethod
    def retrace(self, hidden: Tensor, output: Tensor, visual: Tensor, shown: Tensor, real: Tensor | None) -> Tensor:
        """The output ``[B, q, D]``, of any precision, of an MLP that is shown visual tokens; used in rows that are uncertain.

        hidden, output : ``[B, q, D]``, its own input and output.
        visual : ``[B, n, D]``, the visual tokens of every row, as they entered the prompt.
        shown : ``[B, n]`` bool, those that are shown: all, or those that the recipe has dropped; the rest is padding.
        real : ``[B, q]`` bool, which of the tokens are no padding; None if none is.
        """
