"""AIM: every frame is halved again and again by merging its most similar tokens."""

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .film import equal_parts, newline_targets, share


@register
class AimMerge(ProjectorMethod):
    """Iterative bipartite merging of the tokens of a frame, on the features the language model would read.

    *AIM: Adaptive Inference of Multi-Modal LLMs via Token Merging and Pruning*, arXiv 2412.03248; its merging half.

    In a round the tokens of a frame are assigned alternately to A and B, every token of A is matched with the nearest of B
    by cosine, and the ``r`` most similar are averaged into B: ``b = mean(b, a_1, a_2, ...)``. Rounds halve the tokens
    (``r = m // 2``) as long as the budget allows; the last one removes the rest. The paper keeps 25 %: two rounds for the
    196 tokens of a LLaVA-OneVision frame.

    Every round takes plain means, as in the paper, so in a token merged twice the parts have unequal weights; they still
    sum to one. A merged token takes the slot of its B token. The tiles of a picture are merged one by one, like frames.
    The budget is apportioned to frames by size; if it is less than one token a frame, neighbouring frames are merged as one.
    Tokens without a cell (newlines) are dropped first.

    ``variant="official"``: a ratio is rounded down.

    Paper and program: the program merges video frames only, in exactly two rounds; after each it puts the remaining tokens
    of A, by descending similarity, before those of B, and pairs the next round in that order. So does this, but the tokens
    come out in slot order. Its sort is not stable; here the lower slot comes first on a tie.
    """

    name = "aim-merge"
    summary = "similar tokens of a frame merged, halving by halving"
    paper = "arXiv 2412.03248"
    official_rounding = "down"
    unit = "picture"
    conserves_mass = True

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the token of its frame that each flows into."""
        here, count, target = newline_targets(tokens, count)
        weight = torch.ones(here.shape, device=here.device)
        part, kept = share(frame_numbers(tokens), count)
        for rows, slots, keep in equal_parts(part, kept):
            into, much = merge_in_rounds(tokens.features[rows, slots], halvings(slots.shape[1], keep))
            target[rows, slots] = slots.gather(1, into)
            weight[rows, slots] = much
        return Reduction.merge(target, tokens.valid, weight)


def halvings(size: int, keep: int) -> list[int]:
    """Number of tokens that each round removes to get from ``size`` to ``keep``."""
    out = []
    while size > keep:
        out.append(min(size - keep, size // 2))
        size -= out[-1]
    return out


def merge_in_rounds(x: Tensor, removals: list[int], heads: int = 1, by_size: bool = False) -> tuple[Tensor, Tensor]:
    """Merge tokens of ``x [F, m, D]``, at most half in a round; they are compared by the mean of ``heads`` slices of them, and
    averaged ``by_size``, by how many tokens each represents, or plainly.

    Returns the slot each token flows into, ``[F, m]`` long, and its weight there, ``[F, m]`` float32.
    """
    x = x.float()
    frames, size = x.shape[:2]
    home = torch.arange(size, device=x.device).expand(frames, -1)
    # for every original token the place it is merged into by now, and its weight there
    now, weight = home, torch.ones(frames, size, device=x.device)
    mass = weight
    for remove in removals:
        left = x.shape[1]
        remove = min(remove, left // 2)
        unit = normalize(x.unflatten(2, (heads, -1)).mean(2), dim=-1)
        flow = torch.arange(left, device=x.device).repeat(frames, 1)
        odd = flow[:, 1::2]
        best, partner = most_alike(unit, flow[:, 0::2], odd, first=first_copies(unit))
        ranked = best.argsort(dim=1, descending=True, stable=True)
        giver, stays = ranked[:, :remove], ranked[:, remove:]
        flow = flow.scatter(1, 2 * giver, 2 * partner.gather(1, giver) + 1)
        # whole numbers, so that their sums do not depend on the order
        total = torch.zeros_like(mass).scatter_add_(1, flow, mass)
        order = torch.cat([2 * stays, odd], 1)
        place = torch.zeros_like(flow).scatter_(
            1, order, torch.arange(order.shape[1], device=x.device).expand_as(order)
        )
        x = Reduction.merge(flow, torch.ones_like(flow, dtype=torch.bool), mass).substitute(x)
        x = x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
        weight = weight * mass.gather(1, now)
        now = flow.gather(1, now)
        weight = weight / total.gather(1, now)
        mass = total.gather(1, order) if by_size else mass[:, : order.shape[1]]
        now, home = place.gather(1, now), home.gather(1, order)
    return home.gather(1, now), weight
