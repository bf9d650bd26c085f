"""TempMe without training: tokens merge within frames, then within clips that join two or three neighbours at a time."""

from math import ceil, prod

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..errors import MmaccelError
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .aim import halvings
from .film import equal_parts, newline_targets, share


@register
class TempMe(ProjectorMethod):
    """Progressive merging: of frames, of neighbouring frames, and of neighbouring clips.

    *TempMe: Video Temporal Token Merging for Efficient Text-Video Retrieval*, ICLR 2025, arXiv 2409.01156; its merging.

    The first step merges the tokens of every frame. Every later one puts the tokens of ``joins`` neighbouring clips one behind
    the other and merges those. All steps keep the same share, so that the last one leaves the budget; a clip of more frames
    than all steps join has as many ends, to which the budget is apportioned by size.

    A step is bipartite soft matching: tokens are assigned alternately to A and B, every token of A is matched with the
    nearest of B by cosine, and the most similar are averaged into B, weighted by how many tokens each represents; at most
    half, and then again. A begins with the first token where the clip has an even number of frames, and with the second
    where it is odd. What is left of A comes first, in its order, then B. A merged token takes the slot of its B token.

    An image, or each tile of one, is a clip of one frame. Tokens without a cell (newlines) are dropped first.

    Parameters
    ----------
    joins : how many clips each step joins, (2, 2, 3) as in the program: 12 frames become one clip.

    Paper and program: both merge inside CLIP, whose later layers attend over the clip: up to the eighth layer two tokens a
    frame, at the ninth, tenth and eleventh clips join and lose 30 % and then 10 %; frame positions and adapters are trained.
    Towers here encode frames one by one, so the same merging is behind the tower, on what the language model reads, and nothing
    is trained. Of 49 tokens a frame the program's steps keep 67, 65, 64 and 64 %; one share for all is ours.
    """

    name = "tempme"
    summary = "similar tokens merged within frames, then within ever longer clips"
    paper = "arXiv 2409.01156"
    unit = "picture"
    conserves_mass = True

    joins: tuple[int, ...] = (2, 2, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.joins or min(self.joins) < 2:
            raise MmaccelError(f"tempme joins two clips or more at every step, not joins={self.joins}.")

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the token of its clip that each flows into."""
        here, count, target = newline_targets(tokens, count)
        number, moving = frame_numbers(tokens), tokens.grid[:, :1].to(here.device) > 1
        part, kept = share(torch.where(moving & (number >= 0), number // prod(self.joins), number), count)
        size = self.sizes(tokens)
        for rows, slots, keep in equal_parts(part, kept, pairs=False):
            for row, mine in zip(rows[:, 0].tolist(), slots, strict=True):
                into = self.merged(tokens.features[row, mine].float(), size[row, mine], number[row, mine], keep)
                target[row, mine] = mine[into]
        return Reduction.merge(target, tokens.valid, size)

    def sizes(self, tokens: TokenBatch) -> Tensor:
        """``[N, n]`` float32: how many tokens each represents, one."""
        return torch.ones(tokens.valid.shape, device=tokens.valid.device)

    def keeps(self, lengths: list[int], left: float) -> list[int]:
        """Number of tokens that each clip of ``lengths`` keeps in a step that leaves the share ``left``."""
        # rounded first, so that every machine rounds up alike
        return [ceil(round(length * left, 6)) for length in lengths]

    def merged(self, x: Tensor, size: Tensor, frame: Tensor, keep: int) -> Tensor:
        """``[m]`` long: of tokens ``x [m, D]`` with ``size [m]``, the one that each flows into; ``keep`` of them stay."""
        _, lengths = frame.sort().values.unique_consecutive(return_counts=True)
        clips, frames = list(frame.argsort(stable=True).split(lengths.tolist())), [1] * len(lengths)
        steps, left = [1], len(clips)
        for join in self.joins:
            if left > 1:
                steps.append(join)
                left = ceil(left / join)
        # where the budget is below a token a clip, clips share one: the last step joins all there are
        steps[-1] *= left
        into, each = torch.arange(len(x), device=x.device), (keep / len(x)) ** (1 / len(steps))
        for number, join in enumerate(steps, 1):
            starts = range(0, len(clips), join)
            clips = [torch.cat(clips[i : i + join]) for i in starts]
            frames = [sum(frames[i : i + join]) for i in starts]
            last = number == len(steps)
            wanted = [keep] if last else self.keeps([len(clip) for clip in clips], each)
            for at, (clip, length, count) in enumerate(zip(clips, frames, wanted, strict=True)):
                for remove in halvings(len(clip), count):
                    flow, order = soft_match(x[clip], remove, length % 2)
                    moved = torch.arange(len(x), device=x.device).index_copy(0, clip, clip[flow])
                    every = torch.ones_like(flow, dtype=torch.bool)[None]
                    mean = Reduction.merge(flow[None], every, size[clip][None]).substitute(x[clip][None])[0]
                    # whole numbers, so that their sums do not depend on the order
                    total = torch.zeros_like(size[clip]).scatter_add_(0, flow, size[clip])
                    x, size, into = x.index_copy(0, clip, mean), size.index_copy(0, clip, total), moved[into]
                    clip = clip[order]
                clips[at] = clip
        return into


def soft_match(x: Tensor, remove: int, odd: int) -> tuple[Tensor, Tensor]:
    """Bipartite soft matching of ``x [m, D]``, whose set A begins with the token ``odd``, 0 or 1.

    Returns the place each token flows into, ``[m]`` long, and the places that stay, those of A first.
    """
    place = torch.arange(len(x), device=x.device)
    a, b = place[odd::2], place[1 - odd :: 2]
    unit = normalize(x, dim=-1)[None]
    best, partner = most_alike(unit, a[None], b[None], first=first_copies(unit))
    giver = best[0].argsort(descending=True, stable=True)[:remove]
    flow = place.index_copy(0, a[giver], b[partner[0, giver]])
    stays = torch.ones_like(a, dtype=torch.bool).index_fill(0, giver, False)
    return flow, torch.cat([a[stays], b])
