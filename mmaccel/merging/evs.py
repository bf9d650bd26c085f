"""EVS: tokens that resemble the previous frame are dropped, as in vLLM and SGLang."""

import torch
from torch import Tensor

from ..core.masks import even_in_groups
from ..core.reduction import Reduction
from ..method import Grid, ProjectorMethod, TokenBatch, register
from ..method.blocks import cosine_to
from .film import Film


@register
class Evs(ProjectorMethod):
    """Keep the tokens that changed since the previous frame.

    *Efficient Video Sampling: Pruning Temporally Redundant Tokens for Faster VLM Inference*, arXiv 2510.14624;
    ``--video-pruning-rate`` of vLLM (PR 22980) and SGLang.

    ``s_{t,p} = 1 - cos(x_{t,p}, x_{t-1,p})``; the ``count`` highest of the whole clip stay, the lower slot on a tie. Tokens
    of the first frame have no previous frame and score infinity, so they all stay. vLLM fixes the count before it encodes,
    ``max(tokens per frame, int(T P retain))``; here the budget is always met: if it is smaller than the first frame, as for
    any single image, evenly spaced tokens of the whole unit stay.

    Where an earlier stage dropped the cell of the previous frame, the latest frame before that has it is compared. Tokens
    without a cell (newlines) are dropped first. The features compared are those the language model reads, in float32.

    ``variant="official"``: a ratio is rounded down, and as many tokens as a frame has stay at least.

    Paper and program: the paper compares patches of pixels, by the L1 norm of their difference; vLLM and SGLang compare
    embeddings by cosine, as here.
    """

    name = "evs"
    summary = "tokens that differ from the same cell of the frame before"
    paper = "arXiv 2510.14624"
    unit = "picture"

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program rounds down, and keeps at least as many tokens as one frame has."""
        return max(size // grid[0] if grid else 0, int(retain * size))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the tokens that changed most."""
        here, count = tokens.celled, count.to(tokens.valid.device)
        earlier = Film.of(tokens).earlier()
        score = (1.0 - cosine_to(tokens.features, earlier)).masked_fill(earlier < 0, torch.inf)
        changed = Reduction.top(score.masked_fill(~here, -torch.inf), tokens.valid, count).kept
        short = count < (here & (earlier < 0)).sum(1)
        if not bool(short.any()):
            return Reduction(changed, tokens.valid)
        even = even_in_groups(torch.where(here, 0, -1), count[:, None])
        return Reduction(torch.where(short[:, None], even, changed), tokens.valid)
