"""InfiniPot-V: keep patches that differ from the newest frames, and large values; needs only keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, avg_pool2d, avg_pool3d, normalize

from ...method import KeyBatch, Policy, register


@register
class InfiniPotV(Policy):
    """The budget of a clip is shared by temporal redundancy (TaR) and value norm (VaN).

    *InfiniPot-V: Memory-Constrained KV Cache Compression for Streaming Video Understanding*, NeurIPS 2025,
    arXiv 2506.15745.

    Of the ``N`` keys of a clip that stay, ``round((1 - tar) N)`` are chosen by VaN, the largest ``||V||_2``. The others are
    chosen first, by TaR: the patches of the newest ``int(recent_frames T)`` frames, and of the older frames those with the
    highest ``-mean_q cos(K[q, p], K[t, p])`` over the same patch ``p`` in the newest frames ``q``. Images have VaN only.
    The choice does not depend on the question.

    Parameters
    ----------
    tar : share of the budget for TaR. 0.5 as in the program.
    recent_frames : share of the frames of a clip that count as newest. 0.25 as in the program, whose command line calls it
        ``query_ratio``.
    pooled : average VaN over the grid, more in earlier layers: 7 x 7 x 7 in the first quarter of the layers, 5 x 5 in the
        second, 3 along the sequence in the third, and none in the last. Off, as in the released scripts.

    Paper and program: the program fails where the newest frames alone exceed the share of TaR; here the newest of them
    stay. When frames are streamed, the same is done whenever the cache is full.
    """

    name = "infinipot-v"
    summary = "patches unlike those of the newest frames, and large values; needs no attention"
    paper = "arXiv 2506.15745"
    default_retain = 0.25
    by_layer = True
    limits = {"tar": "[0, 1]", "recent_frames": "(0, 1)"}

    tar: float = 0.5
    recent_frames: float = 0.25
    pooled: bool = False

    def score(self, keys: KeyBatch) -> Tensor:
        out = torch.linalg.vector_norm(keys.values, dim=-1, dtype=torch.float32)
        for clip in keys.once(self._clips):
            norms = out[clip.row][:, clip.at]
            if self.pooled:
                norms = _pooled(norms, clip.cells, clip.size, 4 * keys.layer // keys.depth)
            if clip.frames is not None:
                norms = clip.frames.picked(keys.keys[clip.row][:, clip.at], norms)
            out[clip.row][:, clip.at] = norms
        return out

    def _clips(self, keys: KeyBatch) -> list[Clip]:
        """The clips and images that have keys, with what TaR picks from."""
        if keys.picture is None or keys.cells is None:
            return []
        clips, visual = [], keys.visual & keys.valid
        for row in range(len(visual)):
            pictures = keys.picture[row].masked_fill(~visual[row], -1)
            rivals = max(1, int((keys.valid[row] if self.joint else visual[row]).sum()))
            for picture in pictures.unique().tolist():
                at = ((pictures == picture) & (keys.cells[row, :, 0] >= 0)).nonzero()[:, 0]
                if picture < 0 or not len(at):
                    continue
                cells = keys.cells[row, at]
                size = tuple(int(n) + 1 for n in cells.amax(0))
                count = 0 if keys.count is None else int(keys.count[row]) * len(at) // rivals
                clips.append(Clip(row, at, cells, size, self._frames(cells, count)))
        return clips

    def _frames(self, cells: Tensor, count: int) -> Frames | None:
        """What TaR picks from, None where it picks none of the ``count`` keys of a clip that stay; ``cells [n, 3]``."""
        times, frame = cells[:, 0].unique(return_inverse=True)
        newest = int(len(times) * self.recent_frames)
        budget = count - round((1 - self.tar) * count)
        if newest < 1 or budget < 1:
            return None
        return Frames.of(frame, cells[:, 1:], len(times) - newest, budget)


@dataclass(frozen=True)
class Clip:
    """A clip or image: the slots ``at [n]`` of its keys in a row, and their ``cells [n, 3]``, all below ``size``."""

    row: int
    at: Tensor
    cells: Tensor
    size: tuple[int, ...]
    frames: Frames | None


@dataclass(frozen=True)
class Frames:
    """The keys of a clip by frame and patch.

    frame, place : ``[n]`` long, the number of the frame and of the patch.
    late : ``[m]`` long, the keys of the newest frames, those from ``newest`` on.
    held : ``[newest frames, patches]`` bool, the patches of the newest frames that have a key.
    budget : how many keys are picked.
    """

    frame: Tensor
    place: Tensor
    late: Tensor
    held: Tensor
    newest: int
    budget: int = 0

    @staticmethod
    def of(frame: Tensor, patch: Tensor, newest: int, budget: int = 0) -> Frames:
        """``frame [n]`` long; ``patch [n, 2]`` long."""
        place = patch[:, 0] * (int(patch[:, 1].max()) + 1) + patch[:, 1]
        held = torch.zeros(int(frame.max()) + 1 - newest, int(place.max()) + 1, dtype=torch.bool, device=frame.device)
        late = (frame >= newest).nonzero()[:, 0]
        held[frame[late] - newest, place[late]] = True
        return Frames(frame, place, late, held, newest, budget)

    def picked(self, keys: Tensor, score: Tensor) -> Tensor:
        """``score [H, n]``, infinite for what TaR picks; ``keys [H, n, D]``."""
        # the newest frames rank first, the last of them highest
        late = self.frame >= self.newest
        ranked = torch.where(late, 2.0 + self.frame, -self.redundancy(keys.float()))
        best = ranked.argsort(dim=1, descending=True, stable=True)[:, : self.budget]
        return score.scatter(1, best, torch.inf)

    def redundancy(self, keys: Tensor) -> Tensor:
        """``[H, n]``: the mean cosine of each of ``keys [H, n, D]`` with those of the same patch in the newest frames; -1 where
        none of these has that patch."""
        unit = normalize(keys, dim=-1)
        grid = unit.new_zeros(len(unit), *self.held.shape, unit.shape[-1])
        grid[:, self.frame[self.late] - self.newest, self.place[self.late]] = unit[:, self.late]
        mean = grid.sum(1) / self.held.sum(0).clamp(min=1)[:, None]
        cosine = (unit * mean[:, self.place]).sum(-1)
        return torch.where(self.held.any(0)[self.place], cosine, -1.0)


def _pooled(norms: Tensor, cells: Tensor, size: tuple[int, ...], quarter: int) -> Tensor:
    """``norms [H, n]`` averaged over neighbours in the grid: in 3 dimensions in the first quarter of the layers, then 2, then 1
    (along the sequence), and not in the last quarter."""
    if quarter > 2:
        return norms
    t, h, w = size
    grid = norms.new_zeros(len(norms), *size)
    where = cells.unbind(1)
    grid[:, where[0], where[1], where[2]] = norms
    if quarter == 0:
        pooled = _odd(7, min(t, h, w))
        grid = avg_pool3d(grid, pooled, 1, pooled // 2)
    elif quarter == 1:
        pooled = _odd(5, min(h, w))
        grid = avg_pool2d(grid, pooled, 1, pooled // 2)
    else:
        grid = avg_pool1d(grid.flatten(1)[:, None], 3, 1, 1)[:, 0].view_as(grid)
    return grid[:, where[0], where[1], where[2]]


def _odd(most: int, size: int) -> int:
    return min(most, size - (size % 2 == 0))
