"""FastVID: a clip is cut where frames change, salient tokens stay, and the others are merged into anchor frames."""

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction, top_mask
from ..method import AttentionGuided, Grid, TokenBatch, register
from ..method.density_peaks import centres, density_peaks
from .film import Clip, Flat, by_clip, frame_means, joined, themselves
from .segments import changing_segments


@register
class FastVID(AttentionGuided):
    """Dynamic segmentation, salient tokens by attention, the rest merged by density into every ``stride``-th frame.

    *FastVID: Dynamic Density Pruning for Fast Video Large Language Models*, NeurIPS 2025, arXiv 2503.11187.

    1. The clip is cut at the ``segments - 1`` lowest cosines of neighbouring frames, and wherever their cosine is below
       ``tau``.
    2. Each frame may keep ``k = int(n retain)`` of its ``n`` tokens. The ``k - int(k merged)`` tokens with most attention in
       the vision tower are salient, and stay as they are.
    3. In each segment every ``stride``-th frame, counted back from the last, is an anchor. The sum of ``int(k merged)`` over
       the frames of the segment is divided evenly among its anchors: as many density peaks of an anchor's other tokens are
       centres.
    4. Every token of the segment that is not salient flows into the centre of largest cosine in *each* anchor. With ``m``
       members, itself included, a centre becomes ``w c + (1 - w) mean(members)``, ``w = max(1 / (m + 1), beta)``.

    The weights of a kept token sum to one; in a segment of several anchors a token flows into several. What rounding leaves
    over is not used, hence ``at_most``. A budget below one token a frame goes to the highest attention of the clip. An image
    is one frame. Newlines are dropped.

    ``variant="official"``: a ratio is rounded down in every frame.

    Parameters
    ----------
    segments, tau : 8 and 0.9 as in the program.
    merged : share of a frame's budget for merged tokens, 0.4 as in the program.
    stride : frames from one anchor to the next, 4 as in the program.
    beta : the least weight of a centre, 0.6 as in the program.
    neighbours : of the density, 4 as in the program.
    query, layer : whose attention makes a token salient, see :class:`AttentionGuided`.

    Paper and program: the program uses features and attention of SigLIP's pooling head, which the models here do not load.
    Here frames are compared by their mean tokens, and tokens by the attention of the tower's tokens, or of its CLS token.
    """

    name = "fastvid"
    summary = "salient tokens of every frame, the rest merged into anchor frames of a segment"
    paper = "arXiv 2503.11187"
    unit = "picture"
    budget = "at_most"
    default_retain = 0.1
    limits = {
        "segments": "[1, inf)",
        "merged": "[0, 1]",
        "stride": "[1, inf)",
        "beta": "[0, 1]",
        "neighbours": "[1, inf)",
    }

    segments: int = 8
    tau: float = 0.9
    merged: float = 0.4
    stride: int = 4
    beta: float = 0.6
    neighbours: int = 4

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Rounded down in every frame."""
        return int(retain * (size // grid[0])) * grid[0] if grid else int(retain * size)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, attention ``[N, n]``, ``count [N]`` -> links of every clip."""
        attention = self.attention(tokens)[0]

        def links(clip: Clip) -> Flat:
            x, seen = tokens.features[clip.row, clip.slots], attention[clip.row, clip.slots]
            return self.clip(x, seen, clip.valid, min(clip.count, clip.cells))

        return by_clip(tokens, count, links)

    def frames(self, x: Tensor, valid: Tensor) -> Tensor:
        """``[T, D]``, the features by which frames are compared: the mean of their tokens ``x [T, P, D]``, ``valid [T, P]``."""
        return frame_means(x, valid)

    def clip(self, x: Tensor, attention: Tensor, valid: Tensor, count: int) -> Flat:
        """The links of one clip ``x [T, P, D]``, ``attention [T, P]``, ``valid [T, P]`` bool (cells with a token), of which
        ``count`` may stay; cells are numbered ``t P + p``."""
        x, size = x.float(), valid.sum(1)
        each = count * size // size.sum()
        if not bool(each.any()):
            best = top_mask(attention.view(1, -1), valid.view(1, -1), size.new_tensor([count]))[0]
            return themselves(best.nonzero()[:, 0])
        context = torch.tensor([int(k * self.merged) for k in each.tolist()], device=x.device)
        normed = normalize(x.flatten(0, 1), dim=-1)
        first_of = first_copies(normed[None])
        salient = top_mask(attention, valid, each - context)
        out = [themselves(salient.flatten().nonzero()[:, 0])]
        for first, last in changing_segments(self.frames(x, valid), self.segments - 1, self.tau):
            anchors = range(last, first - 1, -self.stride)
            share = int(context[first : last + 1].sum()) // len(anchors)
            rest = torch.zeros_like(valid)
            rest[first : last + 1] = valid[first : last + 1] & ~salient[first : last + 1]
            for anchor in anchors if share else ():
                out.append(self._merge(x, normed, first_of, rest, anchor, share))
        return joined(out)

    def _merge(self, x: Tensor, normed: Tensor, first: Tensor | None, rest: Tensor, anchor: int, count: int) -> Flat:
        """Links of the tokens ``rest [T, P]`` bool of a segment into ``count`` density peaks of its frame ``anchor``.

        ``normed [T P, D]`` are the unit vectors of all tokens, and ``first`` the first copies of them.
        """
        mine, places = rest[anchor].nonzero()[:, 0], x.shape[1]
        if not len(mine):
            return themselves(mine)
        own = x[anchor, mine][None]
        peaks = centres(density_peaks(own, torch.ones_like(own[..., 0], dtype=torch.bool), self.neighbours), count)[0]
        slots, sources = anchor * places + mine[peaks], rest.flatten().nonzero()[:, 0]
        into = slots[most_alike(normed[None], sources[None], slots[None], first=first)[1][0]]
        # a centre flows into itself, even if another centre is a copy of it
        into = torch.where(torch.isin(sources, slots), sources, into)
        members = torch.bincount(into, minlength=rest.numel())[into]
        centre = torch.maximum(1.0 / (members + 1), torch.full_like(members, self.beta, dtype=torch.float32))
        return into, sources, (1.0 - centre) / members + centre * (into == sources)
