"""PruMerge and PruMerge+: the picture decides how many tokens stay, and they take up their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import leftmost
from ..core.reduction import Links, Reduction, top_mask
from ..errors import MmaccelError, UnsupportedError
from ..method import AttentionGuided, Grid, ModelFacts, Tap, TokenBatch
from ..method.blocks import BLOCK
from ..method.registry import register
from ._shared import filled


@register
@dataclass(frozen=True)
class PruMerge(AttentionGuided):
    """Tokens whose attention is an outlier stay; the others are merged into them and into one more token.

    *LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models*, ICCV 2025, arXiv 2403.15388.

    ``s_j`` is the CLS attention of the tower's last layer. Tokens with ``s_j > Q3 + 1.5 (Q3 - Q1)`` (quartiles of the
    tile) are chosen. A chosen token ``i`` becomes ``x_i + sum s_j x_j`` over the ``neighbours`` tokens ``j != i``, chosen
    or not, with the most similar keys (cosine). One more token, ``sum s_j x_j`` over all that are not chosen, is added in the
    slot of the best of them. The neighbours' weights are attention as it is: they do not sum to one, and a token may
    flow into several.

    Parameters
    ----------
    adaptive : whether the picture decides. Then ``retain`` is a ceiling (1.0, the default: none), and a segment that would
        exceed it, or ``adaptive=False``, keeps exactly its budget, the added token included.
    neighbours : tokens taken up by a chosen one; the program's 32.
    query, layer : ``query="all"`` takes the attention received from all tokens, for towers without a CLS token.
    heads : ``mean``: attention and keys are means over heads, as the paper's formula for one head leaves open.
        ``official_unsplit``: queries and keys are multiplied without splitting heads, as in the program.

    Paper and program: see ``heads``. The program takes quartiles over a whole batch; here of each tile. It merges what
    enters the projector; here what leaves it is merged. Its tokens come by falling attention; here each has the slot of
    the token it grew from. Without any outlier it keeps the added token alone; here the best token stays too. A tile
    whose budget holds all of it is left as it is unless ``adaptive`` cuts it. Newline tokens are dropped.
    """

    name = "prumerge"
    summary = "tokens with outlying attention, which take up their neighbours (adaptive)"
    paper = "arXiv 2403.15388"
    budget = "adaptive"
    default_retain = 1.0

    layer: int | None = -1
    adaptive: bool = True
    neighbours: int = 32
    heads: Literal["mean", "official_unsplit"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours < 0:
            raise MmaccelError(f"neighbours={self.neighbours} must be 0 or more.")
        if self.heads not in ("mean", "official_unsplit"):
            raise MmaccelError(f"{self.name} knows heads 'mean' and 'official_unsplit', not {self.heads!r}.")

    def check(self, family: ModelFacts) -> None:
        """``official_unsplit`` needs the CLS token."""
        super().check(family)
        if self.heads == "official_unsplit" and self.query == "all":
            why = "which query='all' does not" if family.has_cls else f"which the vision tower of {family.name} lacks"
            raise UnsupportedError(f"heads='official_unsplit' asks the CLS token, {why}; leave it out.")

    def taps(self) -> tuple[Tap, ...]:
        """Attention and keys of ``layer``."""
        if self.heads == "official_unsplit":
            return Tap("cls_attention_unsplit", (self.layer,)), Tap("keys_unsplit", (self.layer,))
        return (*super().taps(), Tap("keys", (self.layer,)))

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Rounded down, and the added token."""
        return min(size, int(retain * size) + 1)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, keys ``[N, n, d]``, ``count [N]`` (a ceiling) -> chosen tokens and one more."""
        (score, seen), valid, count = self.attention(tokens), tokens.valid, count.to(tokens.valid.device)
        keys = tokens.signals[self.taps()[1].kind][:, 0]
        chosen, size = self.fixed(score, seen, count - 1), seen.sum(1)
        whole = (count >= size)[:, None]
        if self.adaptive:
            free = self.free(score, seen)
            kept = free.sum(1) + (free.sum(1) < size)
            fits = ((kept > 0) & (kept <= count))[:, None]
            chosen, whole = torch.where(fits, free, chosen), whole & ~fits
        part = ~whole & (count > 0)[:, None]
        merged = prune_merge(score, keys, chosen & part, seen & part, self.neighbours)
        # nothing is left to merge where all may stay
        return Reduction(merged.kept | (filled(seen, valid, count) & whole), valid, merged.links)

    def free(self, score: Tensor, seen: Tensor) -> Tensor:
        """The choice the picture makes, ``[N, n]`` bool."""
        return top_mask(score, seen, outliers(score))

    def fixed(self, score: Tensor, seen: Tensor, count: Tensor) -> Tensor:
        """The choice of ``count [N]`` tokens, ``[N, n]`` bool."""
        return top_mask(score, seen, count)


@register
@dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """PruMerge with evenly spaced tokens beside the outliers; three times as many.

    *LLaVA-PruMerge*, arXiv 2403.15388, where it is called PruMerge+; the default of the program.

    With ``m`` outliers among ``n`` tokens, those at raster places ``0, k, 2k, ... < n - 1`` with
    ``k = max(1, int(n / m) // 3)`` are chosen too; the rest is :class:`PruMerge`, options included. Where the budget is a
    number (``adaptive=False`` or a ceiling), a quarter of it goes to attention and the rest is spread evenly over
    the other tokens; the split is ours.

    Paper and program: the program ends at place 575 whatever the size, and stops with an error for more than a third of
    outliers (``k = 0``). Its variant for a fixed ratio, meant for training, chooses tokens twice; ours does not.
    """

    name = "prumerge-plus"
    summary = "PruMerge with evenly spaced tokens beside the outliers (adaptive)"

    def free(self, score: Tensor, seen: Tensor) -> Tensor:
        """Outliers and a regular grid of places."""
        best, size, place = super().free(score, seen), seen.sum(1), seen.cumsum(1) - 1
        step = (size // best.sum(1).clamp(min=1) // 3).clamp(min=1)[:, None]
        return best | (seen & (place % step == 0) & (place < size[:, None] - 1))

    def fixed(self, score: Tensor, seen: Tensor, count: Tensor) -> Tensor:
        """A quarter by attention, the rest evenly spaced."""
        best = top_mask(score, seen, (count + 3) // 4)
        rest = seen & ~best
        left, size, place = rest.sum(1)[:, None], (count - best.sum(1)).clamp(min=0)[:, None], rest.cumsum(1) - 1
        size, left = torch.minimum(size, left), left.clamp(min=1)
        # place p is taken where a line of slope size / left passes a whole number; the half centres it
        upto, before = ((p * size + left // 2) // left for p in (place + 1, place))
        return best | (rest & (upto > before))


def outliers(score: Tensor) -> Tensor:
    """``[N]`` long: how many of ``score [N, n]`` lie above the third quartile by more than 1.5 times the distance of the
    quartiles (interpolated linearly); NaN is left out. At least one where there is any."""
    quarters = torch.tensor([0.25, 0.75]).to(score.device, non_blocking=True)
    low, high = score.nanquantile(quarters, dim=1)
    above = (score > (high + 1.5 * (high - low))[:, None]).sum(1)
    return above.clamp(min=1)


def prune_merge(score: Tensor, keys: Tensor, chosen: Tensor, seen: Tensor, neighbours: int) -> Reduction:
    """The merge of :class:`PruMerge`.

    Parameters
    ----------
    score : ``[N, n]``, the weight with which a token flows into another one.
    keys : ``[N, n, d]``, what similarity is measured on.
    chosen, seen : ``[N, n]`` bool, the tokens that stay, and all tokens.
    """
    n = seen.shape[1]
    key = normalize(keys.float().masked_fill(~seen[..., None], 0.0), dim=-1)
    slots = torch.arange(n, device=seen.device)
    rows = torch.arange(len(seen), device=seen.device)[:, None]
    k, first = min(neighbours, n), first_copies(key, seen)
    # (unit, slot, source): every chosen token is itself, with weight one
    links = [torch.stack([*chosen.nonzero(as_tuple=True), chosen.nonzero()[:, 1]])]
    width = max(1, BLOCK // max(1, seen.numel()))
    for part, real in zip(*(x.split(width, 1) for x in leftmost(chosen)), strict=True):
        similar = torch.bmm(key[rows, part], key.transpose(1, 2))
        if first is not None:
            similar = similar.gather(2, first[:, None].expand(similar.shape))
        others = seen[:, None] & real[..., None] & (part[..., None] != slots)
        batch, which, source = _nearest(similar, others, k).nonzero(as_tuple=True)
        links.append(torch.stack([batch, part[batch, which], source]))
    own = len(links[0][0])
    rest = seen & ~chosen
    added = top_mask(score, rest, torch.ones_like(rest[:, 0], dtype=torch.long))
    batch, source = rest.nonzero(as_tuple=True)
    links.append(torch.stack([batch, added.long().argmax(1)[batch], source]))
    batch, slot, source = torch.cat(links, 1)
    weight = score[batch, source].clone()
    weight[:own] = 1.0
    return Reduction(chosen | added, seen, Links(batch, slot, source, weight) if len(batch) else None)


def _nearest(similar: Tensor, among: Tensor, k: int) -> Tensor:
    """``[N, a, n]`` bool: the ``k`` largest of ``similar`` in every row ``among``; equal ones go to the lower slot."""
    if k == 0:
        return torch.zeros_like(among)
    similar = similar.masked_fill(~among, -torch.inf)
    least = similar.topk(k, dim=2).values[..., -1:]
    above, equal = similar > least, similar == least
    missing = k - above.sum(2, keepdim=True)
    return (above | (equal & (equal.cumsum(2) <= missing))) & among
