"""Coverage: the kept tokens are like all others."""

from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.tokens import by_row
from ._coverage import by_windows, cosines, covering


@register
class Coverage(ProjectorMethod):
    """Facility location on the tokens that the language model would read.

    A rule of mmaccel; no paper. A token is covered by the largest cosine, or zero, to a token that was picked. The token that
    adds most to the sum over all tokens is picked until ``count`` are, the lower slot on a tie: ``scope`` (NeurIPS 2025)
    without the attention of the tower. So it needs no attention, no CLS token and no text. Tokens of all tiles, and newlines,
    are picked from together. Pictures and clips of more than 4,096 tokens are picked from in runs of as many, with budgets in
    proportion.
    """

    name = "coverage"
    summary = "tokens that are like most others (facility location on cosines)"
    unit = "picture"
    default_retain = 0.25

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the picked slots."""
        valid = tokens.valid

        def pick(part: slice, wanted: Tensor) -> Tensor:
            pairs, first = cosines(tokens.features[:, part], valid[:, part])
            return covering(pairs, valid[:, part], wanted, first)

        return Reduction(by_windows(valid, count.to(valid.device), pick), valid)
