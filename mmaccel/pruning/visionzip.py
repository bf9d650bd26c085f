"""VisionZip: dominant tokens stay, the others are merged into a few contextual ones."""

from typing import Literal

import torch
from torch import Tensor

from ..core.reduction import Links, Reduction, top_mask
from ..method import AttentionGuided, Tap, TokenBatch, register
from ..method.blocks import nearest_kept
from ._shared import filled, part_of


@register
class VisionZip(AttentionGuided):
    """Most of the budget goes to the tokens with most attention, the rest to merged tokens.

    *VisionZip: Longer is Better but Not Necessary in Vision Language Models*, CVPR 2025, arXiv 2412.04467.

    Of ``count`` tokens, ``c = contextual`` are contextual and the others dominant: the highest by CLS attention (mean over
    heads) of the layer the language model reads. Among the ``R`` tokens left, in raster order, every
    ``max(1, R // c)``-th is a target until there are ``c``; each other one flows to the target with the most similar key
    (cosine of keys, mean over heads). With ``m`` members ``x_i``, a target ``y`` becomes ``y + (1/m) sum x_i``, in its own
    slot; a target without members stays as it is.

    Parameters
    ----------
    contextual : a float is the share of the budget, rounded half up, an int the number in each segment. The default is the
        paper's 10 of 64 (also 20 of 128 and 30 of 192).
    weights : ``program`` as above: the weights of a target with members sum to two, so its norm is about twice that of a
        token; ``mean`` averages target and members.
    query, layer : ``query="all"`` ranks by the attention received from all tokens, as the authors do for towers
        without a CLS token; keys are those of the same layer.

    Paper and program: the program also keeps and projects the CLS token, for which Hugging Face's models have no place in
    the prompt; here all of the budget goes to patches. It merges the inputs of the projector, here its outputs are merged.
    Newline tokens are dropped first, and tiles are reduced one by one, both as in the program; but tiles share the budget
    by the number of their tokens without padding.
    """

    name = "visionzip"
    summary = "dominant tokens by attention, the rest merged into contextual ones"
    paper = "arXiv 2412.04467"
    limits = {"contextual": "[0, inf) or [0.0, 1.0]"}

    contextual: float = 10 / 64
    weights: Literal["program", "mean"] = "program"

    def taps(self) -> tuple[Tap, ...]:
        return (*super().taps(), Tap("keys", (self.layer,)))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, keys ``[N, n, d]``, ``count [N]`` -> dominant and contextual tokens."""
        (score, seen), valid, count = self.attention(tokens), tokens.valid, count.to(tokens.valid.device)
        room = torch.minimum(count, seen.sum(1))
        merged = part_of(room, self.contextual)
        dominant = top_mask(score, seen, room - merged)
        target = strided(seen & ~dominant, merged)
        kept = filled(dominant | target, valid, count)
        member = seen & ~kept & (merged > 0)[:, None]
        if not bool(member.any()):
            return Reduction(kept, valid)

        into = nearest_kept(tokens.signals["keys"][:, 0], target, seen)
        batch, source = member.nonzero(as_tuple=True)
        slot = into[batch, source]
        members = torch.zeros_like(into).scatter_add_(1, into, member.long())
        home, self_ = (target & (members > 0)).nonzero(as_tuple=True)
        extra = int(self.weights == "mean")
        weight = 1.0 / torch.cat([members[batch, slot] + extra, members[home, self_] * extra + 1]).float()
        links = Links(torch.cat([batch, home]), torch.cat([slot, self_]), torch.cat([source, self_]), weight)
        return Reduction(kept, valid, links)


def strided(candidates: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: of the ``R`` slots in ``candidates [N, n]`` every ``max(1, R // count)``-th, at most ``count [N]``."""
    place = candidates.cumsum(1) - 1
    step = (candidates.sum(1) // count.clamp(min=1)).clamp(min=1)[:, None]
    return candidates & (place % step == 0) & (place // step < count[:, None])
