"""DyCoke's temporal merging: in every group of four frames, tokens that repeat those of an earlier frame are dropped."""

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import even_in_groups, group_sizes, top_in_groups
from ..core.reduction import Reduction
from ..method import Grid, ProjectorMethod, TokenBatch, register
from ..method.blocks import cosine_to
from .film import Film


@register
class DyCokeTTM(ProjectorMethod):
    """Frames in groups of four: the first stays whole, the others keep the tokens least similar to an earlier frame.

    *DyCoke: Dynamic Compression of Tokens for Fast Video Large Language Models*, CVPR 2025, arXiv 2411.15024; its first
    stage, TTM. (The second prunes the cache while decoding; the recipe ``dycoke`` is both.)

    Of the frames ``0 1 2 3`` of a group, 1 is compared with 0, 2 with 0 and 3 with 2, cell by cell, by cosine of the
    original features; each keeps its ``k`` least similar tokens. Frame 0 stays whole. Despite the name nothing is
    averaged. The authors drop ``K = 0.7`` of the other three frames, which keeps 47.5 %.

    Budget: whole frames first, and the rest is distributed over the others, so that ``k`` differs by one at most. A budget
    too small for the whole frames (less than a quarter, or an image, which is one whole frame) keeps evenly spaced tokens of
    them and drops the other frames. A token whose cell is missing in the frame it is compared with counts as new. Newlines
    are dropped first.

    ``variant="official"``: an odd last frame is dropped, and the last full group of four (frames from ``T - 4`` on) keeps its
    third frame whole; every frame that is compared keeps ``int((1 - K) n)`` tokens, ``K`` such that four keep ``retain``.

    Paper and program: the program fails for four frames or fewer, and returns the tokens of a pruned frame by ascending
    similarity; here they are in raster order.
    """

    name = "dycoke-ttm"
    summary = "groups of four frames; tokens that repeat an earlier frame are dropped"
    paper = "arXiv 2411.15024"
    unit = "picture"
    default_retain = 0.475

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """All tokens of whole frames, and the same number, rounded down, of every frame that is compared."""
        if grid is None or grid[0] < 2 or retain < 0.25:
            return super().official_count(retain, size, grid)
        plan = references(grid[0], self.official)
        # K as a user would have written it: rounding down is sensitive to the last digit
        share = round(1 - (4 * retain - 1) / 3, 9)
        each, whole = size // grid[0], sum(r == f for f, r in enumerate(plan))
        return whole * each + (len(plan) - whole - plan.count(None)) * int((1 - share) * each)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the tokens that stay of every frame."""
        film, valid = Film.of(tokens), tokens.valid
        lengths = tokens.grid[:, 0].tolist()
        longest = film.slots.shape[1]
        # tokens without a cell are an extra frame after all others
        frame = torch.where(film.frame < 0, longest, film.frame).masked_fill(~valid, -1)
        plans = [references(length, self.official) for length in lengths]
        sizes = group_sizes(frame, longest + 1).tolist()
        kept = [self._counts(k, plan, size) for k, plan, size in zip(count.tolist(), plans, sizes, strict=True)]
        counts = torch.tensor(kept, device=valid.device).view(len(valid), longest + 1)

        padded = [[*plan, *[None] * (longest + 1 - len(plan))] for plan in plans]
        refer = torch.tensor([[-1 if r is None else r for r in plan] for plan in padded], device=valid.device)
        refer = refer.gather(1, frame.clamp(min=0))
        other = film.same_cell(refer)
        score = (1.0 - cosine_to(tokens.features, other)).masked_fill(other < 0, torch.inf)
        itself = (refer == frame) & (frame >= 0)
        return Reduction(torch.where(itself, even_in_groups(frame, counts), top_in_groups(score, frame, counts)), valid)

    @staticmethod
    def _counts(count: int, plan: list[int | None], sizes: list[int]) -> list[int]:
        """How many tokens each frame keeps, and last those without a cell; whole frames come first, then compared ones, then
        dropped ones, then tokens without a cell."""
        kind = [0 if r == f else 2 if r is None else 1 for f, r in enumerate(plan)] + [2] * (len(sizes) - 1 - len(plan))
        kind.append(3)
        out = [0] * len(sizes)
        for step in range(4):
            mine = [f for f, k in enumerate(kind) if k == step]
            for f, kept in zip(mine, apportion(count - sum(out), [sizes[f] for f in mine]), strict=True):
                out[f] = kept
        return out


def references(frames: int, tail: bool = False) -> list[int | None]:
    """The frame each of ``frames`` is compared with: itself when it stays whole, None when it is dropped; ``tail``: the
    end of a clip as the authors' program treats it."""
    out: list[int | None] = [f - 1 if f % 2 else f - f % 4 for f in range(frames)]
    if tail:
        for f in range(2, frames, 4):
            if f - 2 not in range(0, frames - 4, 4):
                out[f] = f
        if frames % 2 and frames > 1:
            out[-1] = None
    return out
