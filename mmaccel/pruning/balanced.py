"""The default: what kept most answers of pictures, and of clips."""

from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.registry import get_method


@register
class Balanced(ProjectorMethod):
    """``spacetime``, by the following rule.

    Of the methods that reduce tokens before the language model and need nothing but these tokens, the default is the one that
    kept most answers of the models that come with mmaccel at 25 and 10 %, pictures and clips.
    """

    name = "balanced"
    summary = "the default, which keeps most answers: spacetime"
    unit = "picture"
    default_retain = 0.25

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``[N, n]`` valid slots, ``count [N]`` of each row stay."""
        chosen: ProjectorMethod = get_method("spacetime")()  # type: ignore[assignment]
        return chosen.reduce(tokens, count)

    def remark(self, tokens: TokenBatch) -> str:
        return f"{self.name}: spacetime, as it keeps most answers"
