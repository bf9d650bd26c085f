"""Methods before the language model that rank tokens by what a smaller model attends to in the same prompt."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from ..core.layout import Unit
from ..errors import MmaccelError
from .layers import LayerAttention
from .tokens import ProjectorMethod


class DraftMethod(ProjectorMethod):
    """A method that is shown the attention of a draft: a smaller model of the same family, with the same vocabulary and as many
    tokens a picture, which reads the prompt first and writes ``lookahead - 1`` tokens behind it.

    What :meth:`see` makes of every layer is joined over layers (:attr:`joined`), and what :meth:`settle` makes of all steps
    reaches :meth:`reduce` as ``tokens.signals["draft_match"]``. The draft reads the new part of a prompt only: keys of earlier
    turns take no part.

    ``draft`` is a folder or hub id; by default the folder ``draft`` beside the model's weights.
    """

    unit: ClassVar[Unit] = "picture"
    draft: str
    lookahead: int
    #: how layers are joined
    joined: ClassVar[Literal["max", "sum"]] = "max"

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", str(self.draft))
        if self.lookahead < 1:
            raise MmaccelError(f"{self.name} looks lookahead={self.lookahead} tokens ahead; give 1 or more.")

    @property
    def rows(self) -> int:
        """Of how many of the last prompt tokens the attention is to be seen."""
        return 1

    def begin(self, depth: int) -> int:
        """The first layer, of the draft's ``depth``, that is to be seen."""
        return 0

    @abstractmethod
    def see(self, attention: LayerAttention, prompt: int) -> Tensor:
        """``[B, prompt]`` float32: what one layer says of every prompt token in one step.

        In the first step the queries are those of the last :attr:`rows` prompt tokens (rows that a short prompt lacks see
        nothing and have NaN for attention), later that of the token that was written. The first ``prompt`` keys are those of
        the prompt.
        """

    @abstractmethod
    def settle(self, steps: Tensor, there: Tensor) -> Tensor:
        """``[B, S]`` float32 of ``steps [B, lookahead, S]``; those are ``there [B, lookahead]`` bool that come before an end of
        the draft's answer."""
