"""LagKV: every partition of keys and values is normalised by the range of the next one."""

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
    """Score keys by how much their channels vary, relative to the range of the next partition.

    *LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important*, arXiv 2504.04704.

    After the first ``sinks`` keys the sequence is cut into partitions of ``lag``. Keys and values of a partition are scaled
    per channel by the minimum and maximum of the *next* partition; the score is the standard deviation over channels, with a
    softmax over the partition, summed over keys and values, and keys are ranked within their partition. The sinks, the last
    whole partition and all after it stay. With fewer than two partitions the newest keys stay, as in kvpress.

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
            # ranks within the partition, so that each loses the same share
            rank = ranks(score.argsort(dim=-1, stable=True)) / self.lag
            out[row][:, at[: -self.lag]] = rank.flatten(1).float()
        return out.masked_fill(~keys.valid[:, None], -torch.inf)

    def _rivals(self, keys: KeyBatch) -> list[Tensor]:
        """The slots of every row after its sinks."""
        return [mask.nonzero()[self.sinks :, 0] for mask in keys.valid]


def _stand_out(x: Tensor) -> Tensor:
    """``x [H, stretches, lag, D]`` -> ``[H, stretches - 1, lag]``, the scores of all partitions but the last."""
    behind = x[:, 1:]
    low, high = behind.amin(2, keepdim=True), behind.amax(2, keepdim=True)
    return ((x[:, :-1] - low) / (high - low)).std(-1).softmax(-1)
