"""VisPruner: some tokens stay because they are important, some because they are different."""

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import resorted, true_first
from ..core.reduction import Reduction, top_mask
from ..method import AttentionGuided, Tap, TokenBatch, register
from ._shared import filled


@register
class VisPruner(AttentionGuided):
    """Important tokens by attention; from the rest, near copies are removed round by round.

    *Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs* (VisPruner), ICCV 2025,
    arXiv 2412.01818.

    The ``int(count * important)`` tokens with most CLS attention (mean over heads) stay. The others are put in a list, by
    descending attention. In every round each token at an even place is matched with the most similar one at an odd place
    (cosine of the inputs of the projector). The ``step`` tokens most similar to their match are dropped; the other even ones,
    by descending similarity, followed by the odd ones, are the next list. Rounds end when the list fits the budget.

    Parameters
    ----------
    important : share of the budget for important tokens, rounded down. The paper's default is 0.5.
    step : tokens dropped in a round. ``None`` is the program's 8 for up to 576 tokens, and a 72nd of the tokens for more, so
        that the number of rounds does not grow with the picture (ours).
    query, layer : ``query="all"`` ranks by the attention received from all tokens, for towers without a CLS token.

    Paper and program: the program fails when a list has odd length or is shorter than ``step``; here the last even place
    may be unmatched, and a round drops no more than the even places. Newline tokens are dropped first, and stitched tiles
    are pruned one by one, as in the program.
    """

    name = "vispruner"
    summary = "important tokens by attention, and different ones from the rest"
    paper = "arXiv 2412.01818"
    limits = {"important": "[0, 1]", "step": "[1, inf)"}

    important: float = 0.5
    step: int | None = None

    def taps(self) -> tuple[Tap, ...]:
        return (*super().taps(), Tap("features", (None,)))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, tower features ``[N, n, d]``, ``count [N]`` -> important and diverse tokens."""
        (score, seen), count = self.attention(tokens), count.to(tokens.valid.device)
        size = seen.sum(1)
        room = torch.minimum(count, size)
        # in Python's float64, as in the program: 0.29 * 100 is truncated to 28
        first = torch.tensor([int(k * self.important) for k in room.tolist()]).to(room.device, non_blocking=True)
        important = top_mask(score, seen, first)
        step = torch.full_like(size, self.step) if self.step else (-(-size // 72)).clamp(min=8)
        rest = seen & ~important
        different = drop_similar(tokens.signals["features"][:, 0], score, rest, room - first, step)
        return Reduction(filled(important | different, tokens.valid, count), tokens.valid)


def drop_similar(features: Tensor, score: Tensor, candidates: Tensor, count: Tensor, step: Tensor) -> Tensor:
    """``[N, n]`` bool: the ``count [N]`` slots of ``candidates [N, n]`` that the rounds of :class:`VisPruner` leave.

    features : ``[N, n, d]``, compared by cosine.
    score : ``[N, n]``, orders the first list, highest first.
    step : ``[N]`` long, how many are dropped in one round.
    """
    x = normalize(features.float().masked_fill(~candidates[..., None], 0.0), dim=-1)
    first = first_copies(x)
    order = score.masked_fill(~candidates, -torch.inf).argsort(dim=1, descending=True, stable=True)
    # tokens among them may have scores of -inf too
    order = resorted(order, (~candidates).long())
    # the lengths of all rounds follow from these numbers, so the host waits once and masks are sent without waiting
    length, left, most = torch.stack([candidates.sum(1), count, step]).cpu()
    while bool(((length > left) & (left > 0)).any()):
        evens, odds = (length + 1) // 2, length // 2
        drop = torch.minimum((length - left).clamp(min=0), torch.minimum(most, evens)).masked_fill(left == 0, 0)
        order = order[:, : int(length.max())]
        even, odd = order[:, 0::2], order[:, 1::2]
        places = torch.arange(even.shape[1])
        real_even, real_odd = places < evens[:, None], places[: odd.shape[1]] < odds[:, None]
        masks = torch.cat([real_even, real_odd, real_even & (places >= drop[:, None])], 1)
        masks = masks.to(x.device, non_blocking=True)
        real_even, real_odd, stays = masks.split([even.shape[1], odd.shape[1], even.shape[1]], 1)
        stays = torch.cat([stays, real_odd], 1)
        similar, _ = most_alike(x, even, odd, real_odd, first=first)
        similar = similar.masked_fill(~real_even, -torch.inf)
        even = even.gather(1, similar.argsort(dim=1, descending=True, stable=True))
        order = torch.cat([even, odd], 1).gather(1, true_first(stays))
        length = length - drop
    kept = (torch.arange(order.shape[1]) < torch.minimum(length, left)[:, None]).to(x.device, non_blocking=True)
    return torch.zeros_like(candidates).scatter_(1, order, kept)
