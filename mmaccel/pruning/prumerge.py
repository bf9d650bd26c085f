"""PruMerge and PruMerge+: the picture decides how many tokens stay, and their neighbours are merged into them."""

import torch
from mmaccel_kernels.copies import first_copies
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import leftmost
from ..core.reduction import Links, Reduction, top_mask
from ..errors import UnsupportedError
from ..method import AttentionGuided, Grid, ModelFacts, Tap, TokenBatch, register
from ..method.blocks import BLOCK
from ..method.tokens import Foreseen
from ._shared import filled


@register
class PruMerge(AttentionGuided):
    """Tokens whose attention is an outlier stay; the others are merged into them and into one additional token.

    *LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models*, ICCV 2025, arXiv 2403.15388.

    ``s_j`` is the CLS attention of the tower's last layer. Tokens with ``s_j > Q3 + 1.5 (Q3 - Q1)`` (quartiles of the
    tile) are chosen. A chosen token ``i`` becomes ``x_i + sum s_j x_j`` over the ``neighbours`` tokens ``j != i``, chosen
    or not, with the most similar keys (cosine). One more token, ``sum s_j x_j`` over all tokens that are not chosen, is added
    in the slot of the one with most attention. Attention is used as weight without normalising, so weights do not sum to
    one; and a token may flow into several.

    ``variant="official"``: queries and keys are multiplied without splitting heads, where the paper's formula is for one head
    and attention and keys are means over heads here; needs a CLS token. A fixed ratio is rounded down.

    Parameters
    ----------
    adaptive : whether the picture decides. Then ``retain`` is an upper limit (the default 1.0 is none), and a tile that would
        exceed it keeps exactly its budget, including the added token. With ``adaptive=False`` every tile does.
    neighbours : number of tokens merged into a chosen one; 32 in the program.
    query, layer : ``query="all"`` uses the attention received from all tokens, for towers without a CLS token.

    Paper and program: the program takes quartiles over a whole batch; here over each tile. It merges the
    inputs of the projector; here its outputs are merged. Its tokens are sorted by attention; here each stays in the slot of
    the token it was made from. Without an outlier it keeps the added token alone; here the best token stays too. A tile
    whose budget holds all its tokens is unchanged unless ``adaptive`` reduces it. Newline tokens are dropped.
    """

    name = "prumerge"
    summary = "tokens with outlying attention, which take up their neighbours (adaptive)"
    paper = "arXiv 2403.15388"
    budget = "adaptive"
    default_retain = 1.0
    limits = {"neighbours": "[0, inf)"}

    layer: int | None = -1
    adaptive: bool = True
    neighbours: int = 32

    def check(self, family: ModelFacts) -> None:
        super().check(family)
        if self.official and self.query == "all":
            why = "which query='all' does not" if family.has_cls else f"which the vision tower of {family.name} lacks"
            raise UnsupportedError(
                f"{self.name} with variant='official' asks the CLS token, {why}; leave out the variant."
            )

    def taps(self) -> tuple[Tap, ...]:
        if self.official:
            return Tap("cls_attention_unsplit", (self.layer,)), Tap("keys_unsplit", (self.layer,))
        return (*super().taps(), Tap("keys", (self.layer,)))

    @property
    def foreseen(self) -> Foreseen:
        return "nothing" if self.adaptive else "budget"

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Rounded down, plus the added token."""
        return min(size, int(retain * size) + 1)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, keys ``[N, n, d]``, ``count [N]`` (an upper limit) -> chosen tokens and one more."""
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
        # units whose budget holds all their tokens are not merged
        return Reduction(merged.kept | (filled(seen, valid, count) & whole), valid, merged.links)

    def free(self, score: Tensor, seen: Tensor) -> Tensor:
        """The tokens that are chosen when the picture decides how many, ``[N, n]`` bool."""
        return top_mask(score, seen, outliers(score))

    def fixed(self, score: Tensor, seen: Tensor, count: Tensor) -> Tensor:
        """The tokens that are chosen when ``count [N]`` are to be, ``[N, n]`` bool."""
        return top_mask(score, seen, count)


@register
class PruMergePlus(PruMerge):
    """PruMerge with evenly spaced tokens in addition to the outliers, three times as many.

    *LLaVA-PruMerge*, arXiv 2403.15388, where it is called PruMerge+; the default of the program.

    With ``m`` outliers among ``n`` tokens, those at raster places ``0, k, 2k, ... < n - 1`` with
    ``k = max(1, int(n / m) // 3)`` are chosen too; all else, including the options, is as in :class:`PruMerge`. Where the
    budget decides (``adaptive=False``, or above the limit), a quarter of it goes to the tokens with most attention and the
    rest is spaced evenly over the others; these shares are ours.

    Paper and program: the program ends at place 575 whatever the size, and fails when more than a third are outliers
    (``k = 0``). Its variant for a fixed ratio, meant for training, may choose a token twice; ours does not.
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
        # place p is chosen where a line of slope size / left crosses a whole number; left // 2 centres the choice
        upto, before = ((p * size + left // 2) // left for p in (place + 1, place))
        return best | (rest & (upto > before))


def outliers(score: Tensor) -> Tensor:
    """``[N]`` long: how many of ``score [N, n]`` are above the third quartile by more than 1.5 times the interquartile range
    (linear interpolation, NaN ignored); at least one."""
    quarters = torch.tensor([0.25, 0.75]).to(score.device, non_blocking=True)
    low, high = score.nanquantile(quarters, dim=1)
    above = (score > (high + 1.5 * (high - low))[:, None]).sum(1)
    return above.clamp(min=1)


def prune_merge(score: Tensor, keys: Tensor, chosen: Tensor, seen: Tensor, neighbours: int) -> Reduction:
    """The merge of :class:`PruMerge`.

    score : ``[N, n]``, the weight of a token in those it flows into.
    keys : ``[N, n, d]``, the vectors whose cosines are compared.
    chosen, seen : ``[N, n]`` bool, the tokens that stay, and all tokens that take part.
    """
    n = seen.shape[1]
    key = normalize(keys.float().masked_fill(~seen[..., None], 0.0), dim=-1)
    slots = torch.arange(n, device=seen.device)
    rows = torch.arange(len(seen), device=seen.device)[:, None]
    k, first = min(neighbours, n), first_copies(key, seen)
    # (unit, slot, source): every chosen token flows into itself with weight one
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


def _nearest(similar: Tensor, candidates: Tensor, k: int) -> Tensor:
    """``[N, a, n]`` bool: in every row the ``k`` largest of ``similar`` in ``candidates``; the lower slot on a tie."""
    if k == 0:
        return torch.zeros_like(candidates)
    similar = similar.masked_fill(~candidates, -torch.inf)
    least = similar.topk(k, dim=2).values[..., -1:]
    above, equal = similar > least, similar == least
    missing = k - above.sum(2, keepdim=True)
    return (above | (equal & (equal.cumsum(2) <= missing))) & candidates
