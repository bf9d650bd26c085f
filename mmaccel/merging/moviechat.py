"""MovieChat's memory: the most similar neighbouring frames are averaged until they fit the budget."""

from dataclasses import replace

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import cosine_of, frame_numbers
from .film import Film
from .pool import pool_parts


@register
class MovieChat(ProjectorMethod):
    """Consolidation of adjacent frames.

    *MovieChat: From Dense Token to Sparse Memory for Long Video Understanding*, CVPR 2024, arXiv 2307.16449.

    Similarity of neighbours: the mean over cells of ``cos(x_{t,p}, x_{t+1,p})``. The most similar pair (the earlier on a
    tie) is replaced by its plain average, repeatedly, until ``count // P`` frames of ``P`` tokens are left. Frames are not
    weighted by how many they represent, so frames merged early lose weight; weights still sum to one. A merged frame is in
    the place of its first frame.

    The method merges over time only. What is left of the budget after whole frames is not used (``at_most``). A budget
    below one frame, as for any single image, is met by pooling cells as well (as ``pool`` does), each tile of a picture
    separately. Newlines are dropped.

    The paper consolidates its short-term memory of 18 frames to 2 whenever it is full. Here the whole clip is available and
    is consolidated at once.

    ``variant="official"``: neighbours are compared by the mean of the dot products of all pairs of cells instead of cosines.
    """

    name = "moviechat"
    summary = "most similar neighbouring frames averaged"
    paper = "arXiv 2307.16449"
    unit = "picture"
    budget = "at_most"
    conserves_mass = True
    foreseen = "grid"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> frames averaged, then cells where needed."""
        film, here, valid = Film.of(tokens), tokens.celled, tokens.valid
        slot = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
        target = torch.where(here, slot, -1)
        weight = torch.ones(valid.shape, device=valid.device)
        size, count = valid.sum(1), count.to(valid.device)
        whole, bare = count >= size, ~here.any(1)
        target = torch.where(whole[:, None], torch.where(valid, slot, -1), target)
        target = torch.where((bare & ~whole)[:, None] & (slot < count[:, None]), slot, target)
        pooled = torch.where(whole | bare, size, count)
        # the parts that are pooled if the budget requires it: tiles of a picture, or the one frame left of a clip
        number = frame_numbers(tokens)
        for row, wanted in enumerate(count.tolist()):
            slots = film.slots[row, : int(tokens.grid[row, 0])]
            held = slots >= 0
            slots = slots[held.any(1)]
            held, at = slots >= 0, slots.clamp(min=0)
            places = int(held.any(0).sum())
            if len(slots) < 2 or bool(whole[row]) or not wanted:
                continue
            frames = max(1, wanted // places)
            run, much = consolidate(tokens.features[row, at] * held[..., None], frames, self.official)
            # the first frame of a run that has the cell receives it
            first = at.masked_fill(~held, valid.shape[1])
            onto = torch.full_like(first[:frames], valid.shape[1])
            onto = onto.scatter_reduce(0, run[:, None].expand_as(first), first, "amin")
            target[row, slots[held]] = onto[run][held]
            weight[row, slots[held]] = much[:, None].expand_as(held)[held]
            if frames * places <= wanted:
                pooled[row] = size[row]
            else:
                number[row] = number[row].clamp(max=0)
        merged = Reduction.merge(target, valid, weight)
        if bool((pooled >= size).all()):
            return merged
        return merged.then(pool_parts(replace(tokens, valid=merged.kept), number, pooled))


def consolidate(x: Tensor, frames: int, dots: bool = False) -> tuple[Tensor, Tensor]:
    """Average the most similar neighbouring frames of ``x [T, P, D]`` until ``frames`` are left, by cosine or by ``dots``.

    Returns the frame that each flows into, ``[T]`` long ascending from 0, and its weight there, ``[T]``.
    """
    x = x.float().clone()
    length = len(x)
    now, weight = torch.arange(length, device=x.device), torch.ones(length, device=x.device)

    def alike(a: Tensor, b: Tensor) -> Tensor:
        if not dots:
            return cosine_of(a, b).clamp(max=1.0).mean(-1)
        # the mean over all pairs of cells is the product of the means
        return (a.mean(-2) * b.mean(-2)).sum(-1)

    near = alike(x[:-1], x[1:]) if length > 1 else x.new_zeros(0)
    for left in range(length, max(1, frames), -1):
        pair = near.argmax()
        x[pair] = (x[pair] + x[pair + 1]) / 2
        weight = torch.where((now == pair) | (now == pair + 1), weight / 2, weight)
        now = now - (now > pair).long()
        stay = torch.arange(left - 1, device=x.device)
        x = x[stay + (stay > pair)]
        near = near[(stay[:-1] + (stay[:-1] >= pair)).clamp(max=max(0, left - 2))]
        if left > 2:
            # the new frame has new neighbours on both sides
            for other in ((pair - 1).clamp(min=0), pair.clamp(max=left - 3)):
                near[other] = alike(x[other], x[other + 1])
    return now, weight
