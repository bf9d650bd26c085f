"""PruneVid's first stage: static tokens of a scene are kept once, and similar tokens are merged."""

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.density_peaks import centres, density_peaks, nearest_centre
from .film import Clip, Flat, by_clip, frame_means


@register
class PruneVidMerge(ProjectorMethod):
    """Scenes by clustering frames, static tokens averaged over a scene, density-peak clusters averaged.

    *PruneVid: Visual Token Pruning for Efficient Video Large Language Models*, Findings of ACL 2025, arXiv 2412.16117; its
    merging stage. (The recipe ``prunevid`` prunes by attention inside the language model behind it, and the cache.)

    1. Frames, each the mean of its tokens, are clustered around ``int(T scenes)`` density peaks, and the clusters are made
       contiguous (:func:`scenes_of`).
    2. A cell is static in a scene when the mean cosine of all pairs of its frames is above ``tau``. Its tokens become their
       mean, in the first frame. A scene of one frame has no static cells.
    3. The static tokens of a scene, and the other tokens of each frame, are clustered around ``int(n retain)`` density
       peaks where there are more than ``small``, and every cluster becomes its mean, in the slot of the peak.

    ``retain`` is the share that clustering keeps; static cells reduce it further and small parts raise it, so the budget is
    adaptive. The weights of a kept token sum to one, and every token flows into one. Newlines are dropped.

    Parameters
    ----------
    tau, scenes : 0.8 and 0.25 as in the program.
    neighbours : of the density, 7 as in the program.
    small : parts of this many tokens or fewer are not clustered; 14 as in the program.

    Paper and program: the program adds random noise to the density against ties; here the lower slot of equally dense tokens
    counts as denser. It orders tokens scene by scene, static ones first; here all keep their slots. It divides by zero in
    scenes of one frame, with the effect that they have no static cells.
    """

    name = "prunevid-merge"
    summary = "still places kept once a scene, then clusters of like tokens averaged (adaptive)"
    paper = "arXiv 2412.16117"
    unit = "picture"
    budget = "adaptive"
    conserves_mass = True
    default_retain = 0.5
    limits = {"scenes": "(0, 1]", "neighbours": "[1, inf)"}

    tau: float = 0.8
    scenes: float = 0.25
    neighbours: int = 7
    small: int = 14

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` (as a share of the unit) -> the slot each token flows into."""

        def links(clip: Clip) -> Flat:
            into = self.clip(tokens.features[clip.row, clip.slots], clip.valid, clip.count / clip.size)[clip.valid]
            source = clip.valid.flatten().nonzero()[:, 0]
            return into, source, 1.0 / torch.bincount(into, minlength=clip.valid.numel())[into]

        return by_clip(tokens, count, links)

    def clip(self, x: Tensor, valid: Tensor, retain: float) -> Tensor:
        """``[T, P]`` long: the cell ``t P + p`` that each token of a clip ``x [T, P, D]``, ``valid [T, P]`` bool (cells with a
        token), flows into, where clustering keeps the share ``retain`` of every part."""
        x, (frames, places) = x.float(), valid.shape
        label = self._clusters(frame_means(x, valid), max(1, int(frames * self.scenes)))
        cells = torch.arange(frames * places, device=x.device).view(frames, places)
        into = cells.clone()
        for first, last in scenes_of(label.tolist()):
            scene = slice(first, last + 1)
            still = self._static(x[scene], valid[scene])
            parts = [(x[scene, still].mean(0), cells[first, still], cells[scene, still])]
            for t in range(first, last + 1):
                moving = valid[t] & ~still
                parts.append((x[t, moving], cells[t, moving], cells[t : t + 1, moving]))
            for part, home, members in parts:
                if len(home):
                    kept = int(len(home) * retain) if len(home) > self.small else len(home)
                    into.view(-1)[members] = home[self._clusters(part, max(1, kept))].expand_as(members)
        return into

    def _static(self, x: Tensor, valid: Tensor) -> Tensor:
        """``[P]`` bool: the static cells of a scene ``x [T, P, D]``, ``valid [T, P]`` bool."""
        frames = len(x)
        if frames == 1:
            return torch.zeros_like(valid[0])
        normed = normalize(x, dim=-1)
        # the square of the sum contains every pair twice, and each vector with itself
        pairs = (normed.sum(0).square().sum(-1) - normed.square().sum((0, 2))) / (frames * (frames - 1))
        return (pairs > self.tau) & valid.all(0)

    def _clusters(self, x: Tensor, count: int) -> Tensor:
        """``[m]`` long: for every row of ``x [m, D]`` the row of the density peak whose cluster it belongs to."""
        one = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
        chosen = centres(density_peaks(x[None], one, self.neighbours), count)
        return chosen[0, nearest_centre(x[None], chosen)[0]]


def scenes_of(label: list[int]) -> list[tuple[int, int]]:
    """First and last frame of the contiguous scenes made from the cluster ``label`` of every frame.

    The longest run of frames of every cluster is a scene, the first on a tie. From left to right, every other run joins the
    longer of the neighbouring runs, the left one on a tie.
    """
    runs = [(cluster, len(list(group))) for cluster, group in groupby(label)]
    longest: dict[int, int] = {}
    for number, (cluster, length) in enumerate(runs):
        if length > runs[longest.setdefault(cluster, number)][1]:
            longest[cluster] = number
    lengths, scenes = [length for _, length in runs], [number in longest.values() for number in range(len(runs))]
    while not all(scenes):
        lost = scenes.index(False)
        left = lengths[lost - 1] if lost else 0
        right = lengths[lost + 1] if lost + 1 < len(lengths) else 0
        lengths[lost - 1 if left >= right else lost + 1] += lengths[lost]
        del lengths[lost], scenes[lost]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end - 1) for end, length in zip(ends, lengths, strict=True)]
