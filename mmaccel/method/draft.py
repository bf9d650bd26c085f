"""Methods that a smaller model helps: what it attends to in the same prompt ranks tokens, what it writes ranks keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from ..core.layout import Unit
from ..errors import MmaccelError
from .keys import Policy
from .layers import LayerAttention
from .model_options import Loaded
from .tokens import ProjectorMethod


class Drafted:
    """What methods with a draft have in common: a smaller model of the same family, with the same vocabulary and as many tokens
    a picture, which reads the new part of a prompt and writes behind it.

    ``draft`` is a folder or hub id, or a model that is loaded already, which stays the caller's; by default the folder
    ``draft`` beside the model's weights.
    """

    name: ClassVar[str]
    draft: str | Loaded
    lookahead: int

    def check_draft(self) -> None:
        """Called when a method is made.

        Raises
        ------
        MmaccelError
            If it would write nothing.
        """
        given = Loaded.of(self.draft)
        object.__setattr__(self, "draft", given if isinstance(given, Loaded) else str(given))
        if self.lookahead < 1:
            raise MmaccelError(f"{self.name} looks lookahead={self.lookahead} tokens ahead; give 1 or more.")


class DraftMethod(Drafted, ProjectorMethod):
    """A method that is shown the attention of a draft, which reads the prompt first and writes ``lookahead - 1`` tokens.

    What :meth:`see` makes of every layer is joined over layers (:attr:`joined`), and what :meth:`finalize` makes of all steps
    reaches :meth:`reduce` as ``tokens.signals["draft_match"]``. Keys of earlier turns take no part.
    """

    unit: ClassVar[Unit] = "picture"
    #: how layers are joined
    joined: ClassVar[Literal["max", "sum"]] = "max"

    def __post_init__(self) -> None:
        self.check_draft()

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
    def finalize(self, steps: Tensor, valid: Tensor) -> Tensor:
        """``[B, S]`` float32 of ``steps [B, lookahead, S]``; those are ``valid [B, lookahead]`` bool that come before an end of
        the draft's answer."""


class DraftPolicy(Drafted, Policy):
    """A cache policy that scores the keys of a prompt by the queries of a text that a draft has written behind it.

    The model reads the ``lookahead`` tokens that the draft writes when the prompt is over, once and without storing them:
    :meth:`score` is shown their queries behind those of the prompt's window, and their keys behind those of the prompt, whose
    scores are not looked at. A row whose draft ends its answer has fewer (``places`` and ``index`` of -1). Keys of all
    layers wait for the end of the forward.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_draft()
