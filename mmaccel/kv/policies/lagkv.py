"""LagKV: compare every stretch of keys and values with the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.masks import ranks
from ...errors import MmaccelError
from ...method import KeyBatch, Policy
from ...method.registry import register


@register
@dataclass(frozen=True)
class LagKV(Policy):
    """Score keys by how much they stand out from the range of the stretch behind them.

    *LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important*, arXiv 2504.04704.

    Behind the first ``sinks`` keys the sequence is cut into stretches of ``lag``. Keys and values of a stretch are brought
    to [0, 1] per channel by the minimum and maximum of the *next* stretch; the standard deviation over channels, as a softmax
    over the stretch, is the score, and keys are ranked within their stretch. The last whole stretch, what is behind it, and
    the sinks stay. Where there are no two stretches to compare the newest keys stay, as in kvpress.

    Parameters
    ----------
    sinks, lag : 4 keys and 64, as in kvpress (the paper uses 16 and 128).
    """

    name = "lagkv"
    summary = "keys that stand out from the stretch behind them; needs no attention"
    paper = "arXiv 2504.04704"
    default_retain = 0.25

    sinks: int = 4
    lag: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag < 1:
            raise MmaccelError(f"lagkv cannot compare stretches of lag={self.lag} keys; give 1 or more.")

    def score(self, keys: KeyBatch) -> Tensor:
        """``keys``, ``values [B, Hkv, K, D]`` -> ``[B, Hkv, K]``."""
        out = keys.keys.new_full(keys.keys.shape[:3], torch.inf, dtype=torch.float32)
        for row, at in enumerate(keys.once(self._rivals)):
            stretches = len(at) // self.lag
            if stretches < 2:
                out[row][:, at] = torch.arange(len(at), device=at.device) / self.lag
                continue
            at = at[: stretches * self.lag]
            score = sum(
                _stand_out(x[row][:, at].float().unflatten(1, (stretches, self.lag))) for x in (keys.keys, keys.values)
            )
            assert isinstance(score, Tensor)
            # ranks within the stretch, so that each gives up the same share
            rank = ranks(score.argsort(dim=-1, stable=True)) / self.lag
            out[row][:, at[: -self.lag]] = rank.flatten(1).float()
        return out.masked_fill(~keys.valid[:, None], -torch.inf)

    def _rivals(self, keys: KeyBatch) -> list[Tensor]:
        """Of every row the slots behind the sinks."""
        return [mask.nonzero()[self.sinks :, 0] for mask in keys.valid]


def _stand_out(x: Tensor) -> Tensor:
    """``[H, stretches, lag, D] -> [H, stretches - 1, lag]``."""
    behind = x[:, 1:]
    low, high = behind.amin(2, keepdim=True), behind.amax(2, keepdim=True)
    return ((x[:, :-1] - low) / (high - low)).std(-1).softmax(-1)
