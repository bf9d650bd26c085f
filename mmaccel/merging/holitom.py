"""HoliTom's outer merging: tokens that do not change within a segment are kept once, the others by attention."""

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..core.reduction import Reduction, top_mask
from ..method import ProjectorMethod, Tap, TokenBatch, register
from ..method.density_peaks import centres, density_peaks, nearest_centre
from .film import Clip, Flat, by_clip, joined, themselves
from .segments import static_segments


@register
class HoliTomMerge(ProjectorMethod):
    """Global temporal segmentation, static tokens averaged over time, spatial merging into density peaks.

    *HoliTom: Holistic Token Merging for Fast Video Large Language Models*, NeurIPS 2025, arXiv 2505.21334; the outer
    half. (The inner half merges between layers of the language model.)

    1. Dynamic programming cuts the clip into the segments that save most tokens (:func:`static_segments`): a cell is static
       in a segment when ``cos(x_t, x_{t+1}) > tau`` between all its frames. Its tokens become their mean, in the first frame.
    2. The share of the remaining tokens to keep is ``rho = min(retain / (left / all), 1)``.
    3. Dynamic tokens: of the ``n`` in a frame ``R = ceil(n rho)`` stay, ``round(R (1 - contextual))`` of them by the attention
       they receive in the vision tower, the others as density peaks of the rest.
    4. Static tokens: of the ``n`` in a segment ``round(n rho)`` stay, as density peaks (``min(neighbours, peaks)`` neighbours).
    5. Tokens that are not peaks flow into the nearest one: ``beta peak + (1 - beta) mean(members)``.

    The budget is met up to rounding, as in the paper: every frame with dynamic tokens keeps at least one. An image is a
    single dynamic frame, reduced by attention. Newlines are dropped. The weights of a kept token sum to one.

    ``variant="official"``: of equally dense tokens none counts as denser, so that all copies of a token are peaks.

    Parameters
    ----------
    tau : 0.8 as in the paper, which uses 0.65 where 10 % or less is kept.
    contextual : share of merged tokens among the dynamic ones; the paper's ``D``, 0 by default (attention only).
    beta : weight of the peak, 0.6 as in the paper; None is the plain mean of the cluster.
    neighbours : of the density, 7 as in the paper.
    longest : the most frames of a segment.
    layers : tower layers to sum received attention over; None is the layer the language model reads.

    Paper and program: ``contextual > 0`` crashes in the program (a mask of the wrong shape). It adds random noise to the
    density against ties; here equally dense tokens rank by slot. With newlines in a grid it appends one to every row that
    has tokens; here they are dropped.
    """

    name = "holitom-merge"
    summary = "still places kept once a segment of frames, the rest by attention"
    paper = "arXiv 2505.21334"
    unit = "picture"
    budget = "adaptive"
    limits = {
        "contextual": "[0, 1]",
        "beta": "[0, 1]",
        "neighbours": "[1, inf)",
        "longest": "[1, inf)",
        "layers": "not empty",
    }

    tau: float = 0.8
    contextual: float = 0.0
    beta: float | None = 0.6
    neighbours: int = 7
    longest: int = 1024
    layers: tuple[int | None, ...] = (None,)

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("received_attention", tuple(self.layers)),)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``received_attention [N, layers, n]``, ``count [N]`` -> links of every clip."""
        attention = tokens.signals["received_attention"].float().sum(1)

        def links(clip: Clip) -> Flat:
            x, seen = tokens.features[clip.row, clip.slots], attention[clip.row, clip.slots]
            return self.clip(x, seen, clip.valid, clip.count / clip.cells)

        return by_clip(tokens, count, links)

    def clip(self, x: Tensor, attention: Tensor, valid: Tensor, retain: float) -> Flat:
        """The links of one clip ``x [T, P, D]``, ``attention [T, P]``, ``valid [T, P]`` bool (cells with a token), of which the
        share ``retain`` may stay; cells are numbered ``t P + p``."""
        x, places = x.float(), x.shape[1]
        similar = (cosine_similarity(x[:-1], x[1:], dim=-1) > self.tau) & valid[:-1] & valid[1:]
        segments, saved = static_segments(similar, self.longest)
        tokens = int(valid.sum())
        rho = min(retain / ((tokens - saved) / tokens), 1.0)

        still = torch.zeros_like(valid)
        for first, last in segments:
            if last > first:
                still[first : last + 1] = similar[first:last].all(0)
        dynamic = valid & ~still
        kept = [math.ceil(n * rho) for n in dynamic.sum(1).tolist()]
        ranked = [round(k * (1 - self.contextual)) for k in kept]
        dominant = top_mask(attention, dynamic, torch.tensor(ranked, device=x.device))
        out = [themselves(dominant.flatten().nonzero()[:, 0])]
        for t, wanted in enumerate(k - r for k, r in zip(kept, ranked, strict=True)):
            if wanted:
                rest = (dynamic[t] & ~dominant[t]).nonzero()[:, 0]
                slot, source, weight = self._merge(x[t, rest], wanted)
                out.append((t * places + rest[slot], t * places + rest[source], weight))
        for first, last in segments:
            at = still[first].nonzero()[:, 0]
            if wanted := round(len(at) * rho):
                slot, source, weight = self._merge(x[first : last + 1, at].mean(0), wanted)
                frames = torch.arange(first, last + 1, device=x.device)
                sources = frames[:, None] * places + at[source]
                slots = (first * places + at[slot]).expand_as(sources)
                out.append((slots.flatten(), sources.flatten(), (weight / len(frames)).repeat(len(frames))))
        links = joined(out)
        return (
            links if len(links[0]) else themselves(attention.masked_fill(~valid, -torch.inf).flatten().argmax()[None])
        )

    def _merge(self, x: Tensor, count: int) -> Flat:
        """Links of ``x [m, D]`` into ``count`` density peaks; slots and sources are rows of ``x``."""
        one = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
        chosen = centres(density_peaks(x[None], one, min(self.neighbours, count), self.official), count)
        cluster = nearest_centre(x[None], chosen)[0]
        slot = chosen[0, cluster]
        members = torch.bincount(cluster, minlength=count)[cluster]
        centre = slot == torch.arange(len(x), device=x.device)
        if self.beta is None:
            weight = 1.0 / members
        else:
            peak = torch.where(members > 1, self.beta, 1.0)
            weight = torch.where(centre, peak, (1.0 - self.beta) / (members - 1).clamp(min=1))
        return slot, torch.arange(len(x), device=x.device), weight.float()
