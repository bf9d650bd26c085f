"""InfiniPot-V: keep patches that changed lately, and values that are large; nothing but keys and values is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, avg_pool2d, avg_pool3d, normalize

from ...errors import MmaccelError
from ...method import KeyBatch, Policy
from ...registry import register


@register
@dataclass(frozen=True)
class InfiniPotV(Policy):
    """Temporal redundancy (TaR) and value norm (VaN) share the budget of a clip.

    *InfiniPot-V: Memory-Constrained KV Cache Compression for Streaming Video Understanding*, NeurIPS 2025,
    arXiv 2506.15745.

    Of the ``N`` keys of a clip that stay, ``round((1 - tar) N)`` are for VaN. The others are the patches of the newest
    ``int(recent_frames T)`` frames, and of the older frames those with the highest ``-mean_q cos(K[q, p], K[t, p])`` over the
    same patch ``p`` of the newest frames ``q``. What is left goes to the largest ``||V||_2``. Pictures without time have VaN
    only. Question-agnostic: nothing is known of the text behind.

    Parameters
    ----------
    tar : share of the budget for TaR. 0.5 as in the program.
    recent_frames : share of the frames of a clip that count as newest. 0.25 as in the program, whose command line calls it
        ``query_ratio``.
    pooled : average VaN over the grid, more in earlier layers: 7 x 7 x 7 in the first quarter of the layers, 5 x 5, 3 along
        the sequence, then none. Off, as in the released scripts.

    Paper and program: the program fails where the newest frames alone are more than the share of TaR; here the newest of
    them stay. While frames stream in the same is done whenever the cache is full.
    """

    name = "infinipot-v"
    summary = "patches unlike those of the newest frames, and large values; needs no attention"
    paper = "arXiv 2506.15745"
    default_retain = 0.25

    tar: float = 0.5
    recent_frames: float = 0.25
    pooled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.tar <= 1 and 0 < self.recent_frames < 1):
            raise MmaccelError(
                f"infinipot-v needs 0 <= tar <= 1 and 0 < recent_frames < 1, not {self.tar} and {self.recent_frames}."
            )

    def score(self, keys: KeyBatch) -> Tensor:
        """``keys``, ``values [B, Hkv, K, D]``, ``cells [B, K, 3]``, ``count [B]`` -> ``[B, Hkv, K]``."""
        out = keys.values.float().norm(dim=-1)
        visual = keys.visual & keys.valid
        if keys.picture is None or keys.cells is None:
            return out
        for row in range(len(out)):
            pictures = keys.picture[row].masked_fill(~visual[row], -1)
            for picture in pictures.unique().tolist():
                if picture < 0:
                    continue
                at = ((pictures == picture) & (keys.cells[row, :, 0] >= 0)).nonzero()[:, 0]
                if not len(at):
                    continue
                cells = keys.cells[row, at]
                if self.pooled:
                    out[row][:, at] = _pooled(out[row][:, at], cells, 4 * keys.layer // keys.depth)
                if keys.count is not None:
                    rivals = keys.valid[row] if self.joint else visual[row]
                    count = int(keys.count[row]) * len(at) // max(1, int(rivals.sum()))
                    out[row][:, at] = self.picked(keys.keys[row][:, at], out[row][:, at], cells, count)
        return out

    def picked(self, keys: Tensor, score: Tensor, cells: Tensor, count: int) -> Tensor:
        """``score [H, n]`` of one clip, infinite for what TaR picks; ``keys [H, n, D]``, ``cells [n, 3]``."""
        times, frame = cells[:, 0].unique(return_inverse=True)
        newest = int(len(times) * self.recent_frames)
        budget = count - round((1 - self.tar) * count)
        if newest < 1 or budget < 1:
            return score
        redundant = temporal_redundancy(keys.float(), frame, cells[:, 1:], len(times) - newest)
        late = frame >= len(times) - newest
        # the newest frames come first, their last frame before the others
        ranked = torch.where(late, 2.0 + frame, -redundant)
        best = ranked.argsort(dim=1, descending=True, stable=True)[:, :budget]
        return score.scatter(1, best, torch.inf)


def temporal_redundancy(keys: Tensor, frame: Tensor, patch: Tensor, newest: int) -> Tensor:
    """``[H, n]``: the mean cosine of each key to those of the same patch in the frames from ``newest`` on; -1 where that
    patch is in none of them.

    Parameters
    ----------
    keys : ``[H, n, D]``; frame : ``[n]`` long; patch : ``[n, 2]`` long.
    """
    unit = normalize(keys, dim=-1)
    place = patch[:, 0] * (int(patch[:, 1].max()) + 1) + patch[:, 1]
    width, frames = int(place.max()) + 1, int(frame.max()) + 1 - newest
    grid = unit.new_zeros(len(unit), frames, width, unit.shape[-1])
    there = torch.zeros(frames, width, dtype=torch.bool, device=keys.device)
    late = frame >= newest
    grid[:, frame[late] - newest, place[late]] = unit[:, late]
    there[frame[late] - newest, place[late]] = True
    mean = grid.sum(1) / there.sum(0).clamp(min=1)[:, None]
    cosine = (unit * mean[:, place]).sum(-1)
    return torch.where(there.any(0)[place], cosine, -1.0)


def _pooled(norms: Tensor, cells: Tensor, quarter: int) -> Tensor:
    """``norms [H, n]`` averaged over neighbours in the grid, as many dimensions as the quarter of the layers says."""
    if quarter > 2:
        return norms
    t, h, w = (int(n) + 1 for n in cells.amax(0))
    grid = norms.new_zeros(len(norms), t, h, w)
    where = cells.unbind(1)
    grid[:, where[0], where[1], where[2]] = norms
    if quarter == 0:
        size = _odd(7, min(t, h, w))
        grid = avg_pool3d(grid, size, 1, size // 2)
    elif quarter == 1:
        size = _odd(5, min(h, w))
        grid = avg_pool2d(grid, size, 1, size // 2)
    else:
        grid = avg_pool1d(grid.flatten(1)[:, None], 3, 1, 1)[:, 0].view_as(grid)
    return grid[:, where[0], where[1], where[2]]


def _odd(most: int, size: int) -> int:
    return min(most, size - (size % 2 == 0))
