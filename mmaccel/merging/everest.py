"""EVEREST: the tokens that change most from one frame to the next stay, wherever in the clip they are."""

import torch
from torch import Tensor

from ..core.masks import even_in_groups
from ..core.reduction import Reduction
from ..method import Grid, ProjectorMethod, TokenBatch, register
from .film import Film


@register
class Everest(ProjectorMethod):
    """Keep the tokens whose features moved farthest since the frame before.

    *EVEREST: Efficient Masked Video Autoencoder by Removing Redundant Spatiotemporal Tokens*, ICML 2024, arXiv 2211.10636;
    its choice of tokens, which has no parameters.

    ``s_{t,p} = ||x_{t,p} - x_{t-1,p}||_2``; tokens of the first frame have the score of the same cell in the second. The
    ``count`` highest of the whole clip stay, the lower slot on a tie. Where an earlier stage dropped the cell of the frame
    before, the latest frame before that has it is compared; a token whose cell is in no other frame changes without limit.
    The tokens of a single picture have nothing to be compared with: evenly spaced ones stay. Newlines are dropped first.
    The authors keep 60 % when they fine-tune and 30 % when they train.

    Paper and program: the program compares patch embeddings, before the vision encoder; here what the language model reads is
    compared, so that nothing is saved in the tower. Its number of frames is a literal. The authors' models were trained
    this way.

    ``variant="official"``: a ratio is rounded down.
    """

    name = "everest"
    summary = "tokens that moved farthest since the frame before"
    paper = "arXiv 2211.10636"
    unit = "picture"
    default_retain = 0.6

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program rounds down."""
        return int(round(retain * size, 6))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the tokens that changed most."""
        here, film = tokens.celled, Film.of(tokens)
        earlier = film.earlier()
        change = moved(tokens.features, earlier).masked_fill(earlier < 0, torch.inf)
        later = film.same_cell(torch.where(film.frame == 0, 1, -1))
        change = torch.where(later >= 0, change.gather(1, later.clamp(min=0)), change)
        still = ((earlier < 0) & (later < 0) | ~here).all(1, keepdim=True)
        even = even_in_groups(torch.where(here, 0, -1), count[:, None].to(here.device))
        change = torch.where(still, torch.where(even, torch.inf, 0.0), change)
        return Reduction.top(change.masked_fill(~here, -torch.inf), tokens.valid, count)


def moved(features: Tensor, slots: Tensor) -> Tensor:
    """``[N, n]`` float32: the distance of each token of ``features [N, n, D]`` from the one at ``slots [N, n]``, 0 for -1."""
    row, own = torch.arange(len(slots), device=slots.device)[:, None], torch.arange(slots.shape[1], device=slots.device)
    at = torch.where(slots < 0, own, slots)
    parts = zip(features.split(256, 1), at.split(256, 1), strict=True)
    return torch.cat([(x.float() - features[row, near].float()).square().sum(-1) for x, near in parts], 1).sqrt()
