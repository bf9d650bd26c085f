"""Frames by the largest product that any of their keys could have with any token of the question."""

import torch
from torch import Tensor

from ...method import RecallPolicy, register


@register
class FrameBounds(RecallPolicy):
    """All layers read the frames in which some key may answer some token of the question best.

    Quest's bound (arXiv 2406.10774) for frames in place of pages: of the keys of every frame the smallest and the largest are
    kept channel by channel, ``m`` and ``M``, without RoPE. The rating of a frame in a layer is the largest
    ``sum_d max(q_d m_d, q_d M_d)`` of all query heads and all tokens of the question. The ratings of a layer are shifted and
    scaled to mean 0 and deviation 1, and a frame counts as much as in the layer in which it stands out most.

    A mean key, as of ``rekv``, tells what a frame shows as a whole; a small sign in one frame of thousands moves it little. The
    question is read twice: once to rate, once with the frames.
    """

    name = "frame-bounds"
    summary = "frames by the largest product that a key could have with a token of the question, the same in all layers"
    paper = "arXiv 2406.10774"
    default_retain = 0.25
    together = True

    def summarise(self, keys: Tensor, frame: Tensor, count: int, received: Tensor | None = None) -> Tensor:
        """``[count, Hkv, 2 D]``: the largest and the smallest keys; 0 where a frame has none."""
        parts = [keys[:, frame == number] for number in range(count)]
        bounds = [torch.cat([x.amax(1), x.amin(1)], dim=-1) if x.shape[1] else keys.new_zeros(()) for x in parts]
        return torch.stack([x.expand(len(keys), 2 * keys.shape[2]) for x in bounds])

    def rate(self, query: Tensor, frames: Tensor) -> Tensor:
        high, low = frames.repeat_interleave(len(query) // frames.shape[1], dim=1).chunk(2, dim=-1)
        above, below = query.clamp(min=0), query.clamp(max=0)
        return (torch.einsum("fhd,hqd->fhq", high, above) + torch.einsum("fhd,hqd->fhq", low, below)).amax((1, 2))
