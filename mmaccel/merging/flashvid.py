"""FlashVID: important and diverse tokens of every frame stay; the rest folds along chains over time, then into clusters."""

from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.budget import apportion
from ..core.reduction import Reduction, top_mask
from ..method import AttentionGuided, Grid, TokenBatch, register
from ..method.density_peaks import centres, density_peaks, nearest_centre
from .film import Clip, Flat, by_clip, frame_means, joined, themselves
from .segments import changing_segments

#: the program's factor of attention, and the most neighbours of a density
_SCALE, _NEIGHBOURS = 1e6, 7


@register
class FlashVIDMerge(AttentionGuided):
    """The outer compression of FlashVID.

    *FlashVID: Efficient Video Large Language Models via Training-free Tree-based Spatiotemporal Token Merging*, 2026.

    1. The clip is cut where neighbouring frames' means have a cosine below ``threshold``, and at the smallest other cosines
       until there are ``segments``.
    2. A frame has ``B`` tokens of the budget, ``ceil(alpha B)`` of them picks: distances ``1 - cos`` to a token are multiplied
       by its attention, the first pick is farthest from its nearest neighbour, each next one farthest from all picks. With
       ``selection="attn_div_v2"`` also by its mean product with the means of the segment's frames.
    3. In a segment every other token looks for the most alike such token of the frame before, and merges into it if their
       cosine is above ``tau``, so that chains and trees form; no more than the budget allows. A root is the mean of its tree.
    4. The roots of each frame are clustered by density (DPC-KNN) into what the picks leave of the budget; a cluster is the mean
       of its roots, at its centre.

    ``variant="official"``: a root is the sum of its tree over one and its own children, so that long chains grow; and clusters
    of every frame are rounded up, for which the budget holds one more token a frame.

    Parameters
    ----------
    threshold, segments : 0.9 and 8 (4 for Qwen).
    alpha, tau : 0.7 and 0.8.
    selection : ``attn_div``, as for Qwen, or ``attn_div_v2``, as for LLaVA.
    query, layer : whose attention counts, see :class:`AttentionGuided`.

    Paper and program: of a segment of one frame the program clusters picks too, so that a place may come out twice, and by
    ``attn_div_v2`` it may pick a token again; here neither. Budgets below one token a frame go to the highest attention. What
    rounding leaves over is not used. The recipe ``flashvid`` prunes again inside the language model, as ``fastv`` does.
    """

    name = "flashvid-merge"
    summary = "important and diverse tokens of every frame, the rest folded along chains over time and clustered"
    paper = "github.com/Fanziyang-v/FlashVID"
    unit = "picture"
    budget = "at_most"
    default_retain = 0.25
    limits = {"segments": "[1, inf)", "threshold": "[-1, 1]", "alpha": "[0, 1]", "tau": "[-1, 1]"}

    threshold: float = 0.9
    segments: int = 8
    alpha: float = 0.7
    tau: float = 0.8
    selection: Literal["attn_div", "attn_div_v2"] = "attn_div"

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Rounded up in every frame, and one more for its clusters."""
        frames = 1 if grid is None else grid[0]
        return min(size, frames * (1 - int(-retain * (size // frames) // 1)))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, attention ``[N, n]``, ``count [N]`` -> links of every clip."""
        attention = self.attention(tokens)[0].nan_to_num(0.0)

        def links(clip: Clip) -> Flat:
            x, paid = tokens.features[clip.row, clip.slots], attention[clip.row, clip.slots]
            return self.clip(x.float(), paid, clip.valid, min(clip.count, clip.cells))

        return by_clip(tokens, count, links)

    def clip(self, x: Tensor, attention: Tensor, valid: Tensor, count: int) -> Flat:
        """The links of one clip ``x [T, P, D]``, ``attention [T, P]``, ``valid [T, P]`` bool, of which ``count`` may stay;
        cells are numbered ``t P + p``."""
        size = valid.sum(1)
        each = (count * size // size.sum() - int(self.official)).tolist()
        if max(each) < 1:
            best = top_mask(attention.view(1, -1), valid.view(1, -1), size.new_tensor([count]))[0]
            return themselves(best.nonzero()[:, 0])
        each = [max(0, one) for one in each]
        # an earlier stage may have left nothing of all frames of a segment
        cuts = [(first, last) for first, last in self.cut(x, valid) if bool(size[first : last + 1].any())]
        return joined(self.segment(x, attention, valid, each, *ends) for ends in cuts)

    def cut(self, x: Tensor, valid: Tensor) -> list[tuple[int, int]]:
        """First and last frame of every segment."""
        return changing_segments(frame_means(x, valid), self.segments - 1, self.threshold)

    def segment(self, x: Tensor, attention: Tensor, valid: Tensor, each: list[int], first: int, last: int) -> Flat:
        """Links of the frames ``first`` to ``last``, which may keep ``each`` tokens."""
        frames, places = range(first, last + 1), x.shape[1]
        picks = [-int(-self.alpha * each[f] // 1) for f in frames]
        picked = torch.zeros_like(valid)
        means = torch.stack([x[f, valid[f]].mean(0) for f in frames if bool(valid[f].any())])
        for f, count in zip(frames, picks, strict=True):
            at = valid[f].nonzero()[:, 0]
            picked[f, at] = self.picks(x[f, at], attention[f, at], means, min(count, len(at)))
        free = valid & ~picked
        inside = torch.zeros_like(valid)
        inside[first : last + 1] = True
        parent, rest = self.chains(x, free & inside, frames, sum(each[f] for f in frames), int((valid & inside).sum()))
        # members of every tree, found from the first frame on
        root = torch.where(parent < 0, torch.arange(len(parent), device=x.device), parent)
        for _ in frames:
            root = root[root]
        source = (free & inside).flatten().nonzero()[:, 0]
        total = torch.bincount(root[source], minlength=len(root))
        if self.official:
            children = parent[source]
            total = 1 + torch.bincount(children[children >= 0], minlength=len(root))
        value = torch.zeros_like(x).flatten(0, 1).index_add(0, root[source], x.flatten(0, 1)[source])
        value = value / total.clamp(min=1)[:, None]
        into, members = self.clusters(value, rest, sum(each[f] for f in frames) - sum(picks), frames, places)
        home = into[root[source]]
        weight = 1.0 / (total[root[source]] * members[home.clamp(min=0)]).float()
        stays = home >= 0
        alone = (picked & inside).flatten().nonzero()[:, 0]
        return joined([themselves(alone), (home[stays], source[stays], weight[stays])])

    def picks(self, x: Tensor, attention: Tensor, means: Tensor, count: int) -> Tensor:
        """``[n]`` bool: ``count`` diverse tokens of one frame ``x [n, D]``; ``means [T, D]`` of the segment's frames."""
        picked = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        if not count:
            return picked
        unit = normalize(x, dim=-1)[None]
        away = 1 - pairs_of_first(torch.bmm(unit, unit.mT), first_copies(x[None]), 1.0)[0]
        away = away * (_SCALE * attention)
        if self.selection == "attn_div_v2":
            away = away * (x @ means.T).mean(1)
        near = away.kthvalue(min(2, len(x)), dim=0).values
        for turn in range(count):
            pick = near.masked_fill(picked, -torch.inf).argmax()
            picked[pick] = True
            near = away[pick] if turn == 0 else torch.minimum(near, away[pick])
        return picked

    def chains(self, x: Tensor, free: Tensor, frames: range, budget: int, size: int) -> tuple[Tensor, Tensor]:
        """``[T P]`` long: the cell of the frame before that each cell merges into, -1 for none; and ``[T, P]`` bool, the free
        cells that merge into none. ``budget`` of the segment's ``size`` tokens must not merge."""
        value, into = torch.full(free.shape, -1.0, device=x.device), torch.full_like(free, -1, dtype=torch.long)
        unit = normalize(x, dim=-1)
        for f in frames[1:]:
            like = unit[f] @ unit[f - 1].T
            value[f], at = like.masked_fill(~free[f][:, None] | ~free[f - 1], -1.0).max(1)
            into[f] = (f - 1) * x.shape[1] + at
        merges = free & (value > self.tau)
        if len(frames) > 1 and size - int(merges.sum()) < budget:
            # free and picked cells alike, of this segment
            every = value[frames[0] : frames[-1] + 1].flatten().sort(descending=True).values
            bar = every[size - budget - 1] if size > budget else every.new_tensor(torch.inf)
            merges = free & (value > max(float(bar), -1 + 1e-6))
        if len(frames) == 1 or self.tau >= 1:
            merges = torch.zeros_like(free)
        return torch.where(merges, into, -1).flatten(), free & ~merges

    def clusters(self, value: Tensor, rest: Tensor, budget: int, frames: range, places: int) -> tuple[Tensor, Tensor]:
        """``[T P]`` long: the centre that each root flows into, -1 where it is dropped; and how many roots a centre has."""
        into = torch.full((len(value),), -1, dtype=torch.long, device=value.device)
        at = {f: f * places + rest[f].nonzero()[:, 0] for f in frames}
        left = [len(at[f]) for f in frames]
        share = budget / max(1, sum(left))
        counts = [-int(-n * share // 1) if share < 1 else n for n in left] if self.official else apportion(budget, left)
        for f, count in zip(frames, counts, strict=True):
            slots = at[f]
            if count >= len(slots):
                into[slots] = slots
            elif count:
                own = value[slots][None]
                score = density_peaks(own, torch.ones_like(own[..., 0], dtype=torch.bool), min(count, _NEIGHBOURS))
                chosen = centres(score, count)
                into[slots] = slots[chosen[0]][nearest_centre(own, chosen)[0]]
        return into, torch.bincount(into[into >= 0], minlength=len(into))
