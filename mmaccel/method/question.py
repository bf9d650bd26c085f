"""Base of methods that compare visual tokens with the question, in the space of the language model or of CLIP."""

from torch import Tensor
from torch.nn.functional import normalize

from .base import Tap
from .tokens import ProjectorMethod, TokenBatch


class QuestionGuided(ProjectorMethod):
    """A method that compares tokens with the question: as the language model reads both, or in the space of a CLIP model.

    ``clip`` is the CLIP model that the vision tower comes from, see ``cdpruner``; ``accelerate_vlm`` then needs ``processor=``.
    """

    needs_question = True
    clip: str | None

    @property
    def text_tower(self) -> str | None:  # type: ignore[override]
        """``clip``."""
        return self.clip

    def taps(self) -> tuple[Tap, ...]:
        """With CLIP, the hidden states of the layer that the language model reads."""
        return (Tap("features"),) if self.clip else ()

    def space(self, tokens: TokenBatch) -> Tensor:
        """``[N, n, d]``, the tokens in the space in which they are compared; with CLIP zero without a patch."""
        return tokens.signals["patches"].nan_to_num(0.0) if self.clip else tokens.features


def question_direction(tokens: TokenBatch, row: int) -> Tensor | None:
    """``[d]`` float32, the mean direction of the words of a unit's question; None without a question."""
    if tokens.question is None or tokens.question_valid is None or not bool(tokens.question_valid[row].any()):
        return None
    return normalize(tokens.question[row, tokens.question_valid[row]].float(), dim=-1).mean(0)


def question_words(tokens: TokenBatch) -> Tensor | None:
    """``[N, q, d]`` float32, the directions of the words of every question, zero for padding; None without questions."""
    if tokens.question is None or tokens.question_valid is None:
        return None
    return normalize(tokens.question.float(), dim=-1).masked_fill(~tokens.question_valid[..., None], 0.0)
