"""Greedy coverage (facility location): every pick adds most to how well all tokens are covered."""

from collections.abc import Callable

import torch
from mmaccel_kernels.copies import first_copies, of_first, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.budget import apportion

#: slots whose pairs are compared at once; longer units are picked from in runs of as many
WINDOW = 4096
#: the share of the largest gain below which a gain is rounding
_NOISE = 1e-12
#: the share of the best worth, or of the largest that one row adds, by which two may differ and still be a tie
_TIE = 2e-6


def covering(
    pairs: Tensor,
    valid: Tensor,
    count: Tensor,
    first: Tensor | None = None,
    weight: Tensor | float = 1.0,
    bonus: Tensor | float = 0.0,
) -> Tensor:
    """``[N, n]`` bool: ``count [N]`` columns of ``pairs [N, m, n]`` picked greedily.

    With ``c_i`` the largest of zero and the picked columns of row ``i``, a column is worth ``weight_j sum_i max(0, pairs_ij -
    c_i) + bonus_j``; the best is picked, the lower one on a tie: two columns that cover each other are worth the same, however
    that is rounded.

    Parameters
    ----------
    valid : ``[N, n]`` bool; nothing else is picked.
    first : ``[N, n]`` long or None, the first column that is equal to each (see :mod:`mmaccel_kernels.copies`).
    weight, bonus : ``[N, n]`` float32, zero or more.
    """
    picked, row = torch.zeros_like(valid), torch.arange(len(valid), device=valid.device)
    covered = pairs.new_zeros(pairs.shape[:2])
    gain = pairs.clamp(min=0).sum(1, dtype=torch.float64)
    least = gain.amax(1, keepdim=True) * _NOISE if gain.numel() else gain
    alone = (pairs.amax(1) * weight).amax(1, keepdim=True) if gain.numel() else pairs.new_zeros(len(pairs), 1)
    for turn in range(int(count.max()) if count.numel() else 0):
        worth = of_first(gain.masked_fill(gain < least, 0.0).float(), first) * weight + bonus
        worth = worth.masked_fill(picked | ~valid, -torch.inf)
        best = worth.amax(1, keepdim=True)
        pick = (worth >= best - _TIE * torch.maximum(best, alone)).int().argmax(1)
        picked[row, pick] |= turn < count
        now = torch.maximum(covered, pairs[row, :, pick])
        # gains change in rows that are covered better; a GPU, which would have to be asked for them, computes all
        at = (now > covered).any(0).nonzero()[:, 0] if pairs.device.type == "cpu" else slice(None)
        before, after = ((pairs[:, at] - c[:, at, None]).clamp_(min=0) for c in (covered, now))
        gain -= (before - after).sum(1, dtype=torch.float64)
        covered = now
    return picked


def by_windows(valid: Tensor, count: Tensor, pick: Callable[[slice, Tensor], Tensor]) -> Tensor:
    """``[N, n]`` bool: what ``pick`` returns for the slots of each window and its part of ``count [N]``, in proportion to its
    ``valid [N, n]`` tokens."""
    if valid.shape[1] <= WINDOW:
        return pick(slice(None), count)
    windows = [slice(start, start + WINDOW) for start in range(0, valid.shape[1], WINDOW)]
    sizes = torch.stack([valid[:, one].sum(1) for one in windows], 1).tolist()
    shares = torch.tensor([apportion(*each) for each in zip(count.tolist(), sizes, strict=True)], device=valid.device)
    return torch.cat([pick(one, shares[:, i]) for i, one in enumerate(windows)], 1)


def cosines(features: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
    """``[N, n, n]`` float32, the cosines of ``features [N, n, D]``, zero for what is not ``valid [N, n]``, equal for copies;
    and the first copy of each token."""
    x = normalize(features.float().masked_fill(~valid[..., None], 0.0), dim=-1)
    first = first_copies(x, valid)
    return pairs_of_first(torch.bmm(x, x.mT), first).masked_fill(~valid[:, :, None], 0.0), first
