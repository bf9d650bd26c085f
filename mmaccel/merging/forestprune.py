"""ForestPrune: tokens are linked over frames into trees, of which the nodes near the roots stay."""

import torch
from mmaccel_kernels.copies import first_copies, of_first, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction, top_mask
from ..method import Grid, ProjectorMethod, TokenBatch, register
from .film import Clip, Flat, by_clip, spare_newlines, themselves

#: the program's walk: likeness below which tokens are no neighbours, temperature, steps, and what stands for none
_LIKE, _TEMPERATURE, _STEPS, _NONE = 0.5, 0.03, 5, -5000.0


@register
class ForestPrune(ProjectorMethod):
    """Every frame is thinned by a walk on its tokens, and what is left is pruned by depth in a forest over time.

    *ForestPrune*, 2026.

    1. In a frame, rows of cosines of at least 0.5, divided by 0.03, become probabilities (softmax). A token is worth the
       lengths of all tokens that end in it after five steps, divided by its number of neighbours; the ``thinned`` share of each
       frame stays, or as much as the budget needs.
    2. A token's candidates are all tokens of earlier frames with a cosine of at least ``similarity`` and a distance, the larger
       of rows and columns as shares of the frame, of at most ``1 - nearness``. It joins the tree of the most alike (the
       nearest, the first tree on a tie), below the tree's last token of an earlier frame; without any it is a root.
    3. While there are more roots than the budget has tokens, of the two most alike roots the later hangs below the earlier.
    4. The ``count`` tokens of least depth stay, the earlier frame first, then the lower slot.

    ``variant="official"``: a ratio is of the tokens that step 1 leaves, rounded half to even.

    Parameters
    ----------
    thinned, similarity, nearness : 0.5, 0.9 and 0.8.

    Paper and program: inside a frame and depth the program takes any. It lays a newline behind every row, which costs no
    budget; here newlines are dropped first. A picture is one frame.
    """

    name = "forestprune"
    summary = "tokens near the roots of trees that link like tokens over frames"
    paper = "github.com/luminousllsa/ForestPrune"
    unit = "picture"
    default_retain = 0.1
    limits = {"thinned": "(0, 1]", "similarity": "[-1, 1]", "nearness": "[0, 1]"}

    thinned: float = 0.5
    similarity: float = 0.9
    nearness: float = 0.8

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program rounds twice: what a frame keeps, and what is kept of that."""
        frames = 1 if grid is None else grid[0]
        return min(size, round(frames * round(size // frames * self.thinned) * retain / self.thinned))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the tokens near the roots."""

        def links(clip: Clip) -> Flat:
            at = clip.slots
            cells, side = tokens.cells[clip.row, at][..., 1:].float(), tokens.grid[clip.row, 1:]
            place = cells / (side.to(cells.device) - 1).clamp(min=1)
            return themselves(self.clip(tokens.features[clip.row, at].float(), place, clip.valid, clip.count))

        return by_clip(tokens, count, links).keeping(spare_newlines(tokens, count))

    def clip(self, x: Tensor, place: Tensor, valid: Tensor, count: int) -> Tensor:
        """The ``count`` cells that stay of ``x [T, P, D]``, at ``place [T, P, 2]``, ``valid [T, P]``; numbered ``t P + p``."""
        sizes, total = valid.sum(1).tolist(), int(valid.sum())
        count = min(count, total)
        room = [min(size, max(round(size * self.thinned), -(-size * count // total))) for size in sizes]
        unit, worth = normalize(x, dim=-1), x.new_full(valid.shape, -torch.inf)
        for t, here in enumerate(valid):
            worth[t, here] = self.worth(x[t, here])
        nodes = top_mask(worth, valid, torch.tensor(room, device=x.device))
        at = nodes.flatten().nonzero()[:, 0]
        unit, place = unit.flatten(0, 1)[at], place.flatten(0, 1)[at]
        frame = (at // valid.shape[1]).tolist()
        depth = self.depths(self.joined(unit, self.parents(unit, place, frame), count))
        order = sorted(range(len(at)), key=lambda node: (depth[node], frame[node], node))
        return at[torch.tensor(sorted(order[:count]), device=at.device)]

    def worth(self, x: Tensor) -> Tensor:
        """``[n]``: what each token of one frame ``x [n, D]`` is worth."""
        unit, first = normalize(x, dim=-1)[None], first_copies(x[None])
        like = pairs_of_first(torch.bmm(unit, unit.mT), first, 1.0)[0]
        step = like.masked_fill(like < _LIKE, 0.0) / _TEMPERATURE
        step = step.masked_fill(step.abs() < 1e-6, _NONE).softmax(1)
        ends = x.norm(dim=-1)[None].double() @ torch.linalg.matrix_power(step.double(), _STEPS)
        return of_first((ends[0] / (step > 0).sum(1)).float()[None], first)[0]

    def parents(self, unit: Tensor, place: Tensor, frame: list[int]) -> list[int]:
        """The parent of every node of directions ``unit [n, D]``, -1 for roots; nodes are in the order of their frames."""
        parent, tree, tails = [-1] * len(frame), unit.new_zeros(len(frame), dtype=torch.long), list[int]()
        start = 0
        while start < len(frame):
            stop = next((i for i in range(start, len(frame)) if frame[i] != frame[start]), len(frame))
            best = torch.full((stop - start,), -1, dtype=torch.long, device=unit.device)
            if start:
                like = unit[:start] @ unit[start:stop].T
                apart = (place[:start, None] - place[start:stop]).abs().amax(-1)
                # coordinates are shares whose difference rounding must not push over the bound
                like = like.masked_fill((like < self.similarity) | (apart > 1 - self.nearness + 1e-6), -torch.inf)
                top = like.amax(0)
                among = (like == top) & (top > -torch.inf)
                near = apart.masked_fill(~among, torch.inf)
                among &= near == near.amin(0)
                number = tree[:start, None].masked_fill(~among, len(frame)).amin(0)
                best = number.masked_fill(number == len(frame), -1)
            joined: dict[int, int] = {}
            for node, found in enumerate(best.tolist(), start):
                if found < 0:
                    tree[node] = len(tails)
                    tails.append(node)
                else:
                    parent[node], joined[found], tree[node] = tails[found], node, found
            for found, node in joined.items():
                tails[found] = node
            start = stop
        return parent

    def joined(self, unit: Tensor, parent: list[int], count: int) -> list[int]:
        """``parent`` with the most alike roots joined until no more than ``count`` are left."""
        roots = [node for node, above in enumerate(parent) if above < 0]
        x = unit[torch.tensor(roots, device=unit.device)]
        like = (
            (x @ x.T)
            .masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1), -torch.inf)
            .cpu()
        )
        best, at = like.max(1)
        for _ in range(len(roots) - count):
            earlier = int(best.argmax())
            later = int(at[earlier])
            parent[roots[later]] = roots[earlier]
            like[:, later] = like[later] = -torch.inf
            stale = (at == later) | (torch.arange(len(at)) == later)
            best[stale], at[stale] = like[stale].max(1)
        return parent

    def depths(self, parent: list[int]) -> list[int]:
        """Number of nodes above each."""
        depth = list[int]()
        for above in parent:
            depth.append(0 if above < 0 else depth[above] + 1)
        return depth
