"""Bases of methods with a draft model: its attention to the prompt ranks tokens, its text ranks keys."""

from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from .base import Method
from .keys import Policy
from .layers import LayerAttention
from .model_options import Loaded
from .tokens import ProjectorMethod


class Drafted(Method):
    """A method with a draft: a smaller model of the same family, with the same vocabulary and as many tokens a picture, which
    reads the new part of a prompt and continues it.

    ``draft`` is a folder or hub id, or a model that is loaded already, which stays the caller's; by default the folder
    ``draft`` beside the model's weights.
    """

    limits = {"lookahead": "[1, inf)"}
    draft: str | Loaded
    lookahead: int

    def __post_init__(self) -> None:
        super().__post_init__()
        given = Loaded.of(self.draft)
        object.__setattr__(self, "draft", given if isinstance(given, Loaded) else str(given))


class DraftMethod(Drafted, ProjectorMethod):
    """A method that sees the attention of a draft, which reads the prompt first and writes ``lookahead - 1`` tokens.

    The scores of :meth:`see` are joined over layers (:attr:`joined`), and the result of :meth:`finalize` over all steps reaches
    :meth:`reduce` as ``tokens.signals["draft_match"]``. Keys of earlier turns take no part.
    """

    unit = "picture"
    #: how layers are joined
    joined: ClassVar[Literal["max", "sum"]] = "max"

    @property
    def rows(self) -> int:
        """Number of last prompt tokens whose attention is observed."""
        return 1

    def begin(self, depth: int) -> int:
        """The first layer of the draft, of ``depth``, that is observed."""
        return 0

    @abstractmethod
    def see(self, attention: LayerAttention, prompt: int) -> Tensor:
        """Scores ``[B, prompt]`` float32 of every prompt token by one layer in one step.

        In the first step the queries are those of the last :attr:`rows` prompt tokens (rows that a short prompt lacks see
        nothing and have NaN for attention), later that of the token that was written. The first ``prompt`` keys are those of
        the prompt.
        """

    @abstractmethod
    def finalize(self, steps: Tensor, valid: Tensor) -> Tensor:
        """Scores ``[B, S]`` float32 from those of all steps ``[B, lookahead, S]``; ``valid [B, lookahead]`` bool is
        False behind the end of the draft's answer."""


class DraftPolicy(Drafted, Policy):
    """A cache policy that scores the keys of a prompt by the queries of a text that a draft has written.

    At the end of the prompt the model reads the ``lookahead`` tokens of the draft once, without storing them: :meth:`score`
    gets their queries behind those of the prompt's window, and their keys, whose scores are ignored, behind those of the
    prompt. A row whose draft ends its answer has fewer (``places`` and ``index`` of -1). Keys of all layers wait for the end
    of the forward.
    """

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: the draft writes behind the whole prompt."""
        return "scores keys by a text that is written behind the whole prompt"
