"""LongVLM: the tokens of a short segment of frames are merged together, halving by halving."""

from math import gcd

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .aim import halvings, merge_in_rounds
from .film import equal_parts, newline_targets, share


@register
class LongVlm(ProjectorMethod):
    """Hierarchical merging within segments of a clip.

    *LongVLM: Efficient Long Video Understanding via Large Language Models*, ECCV 2024, arXiv 2404.03384; its local features.

    A clip is cut into segments of ``frames`` frames. Rounds of bipartite soft matching merge the tokens of a segment: they are
    assigned alternately to A and B, every token of A is matched with the nearest of B by cosine, and the most similar are
    averaged into B, weighted by how many tokens each represents. A round halves the tokens as long as the budget allows,
    which is apportioned to segments by size; the last one removes the rest. A merged token takes the slot of its B token.
    An image, or each tile of one, is a segment of its own. Tokens without a cell (newlines) are dropped first.

    Parameters
    ----------
    frames : frames a segment, 10 as in the program (100 frames, ten segments of 30 tokens each).
    heads : features are compared by the mean of this many slices, 16 as in the program; the largest divisor in common with
        their width.

    Paper and program: the program merges what the penultimate layer of CLIP makes, before the projector, and puts the mean CLS
    tokens of all layers in front; here what the language model reads is merged, and a prompt has no place for more tokens. The
    model was trained with them.
    """

    name = "longvlm"
    summary = "tokens of ten frames merged together, halving by halving"
    paper = "arXiv 2404.03384"
    unit = "picture"
    conserves_mass = True
    limits = {"frames": "[1, inf)", "heads": "[1, inf)"}

    frames: int = 10
    heads: int = 16

    def rounds(self, size: int, keep: int) -> list[int]:
        """Number of tokens of a segment that each round removes."""
        return halvings(size, keep)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the token of its segment that each flows into."""
        here, count, target = newline_targets(tokens, count)
        number, clip = frame_numbers(tokens), tokens.grid[:, :1].to(here.device) > 1
        part, kept = share(torch.where(clip & (number >= 0), number // self.frames, number), count)
        heads = gcd(self.heads, tokens.features.shape[2])
        for rows, slots, keep in equal_parts(part, kept):
            removals = self.rounds(slots.shape[1], keep)
            # what is averaged by size is in the end the plain mean of all that flowed into it
            into, _ = merge_in_rounds(tokens.features[rows, slots], removals, heads, by_size=True)
            target[rows, slots] = slots.gather(1, into)
        return Reduction.merge(target, tokens.valid)
