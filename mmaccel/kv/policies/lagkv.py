"""LagKV: every partition of keys and values is normalised by the range of the next one."""

import torch
from torch import Tensor

from ...core.masks import ranks, true_first
from ...method import KeyBatch, Policy, register


@register
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
    limits = {"lag": "[1, inf)"}

    sinks: int = 4
    lag: int = 64

    def score(self, keys: KeyBatch) -> Tensor:
        slots, number, whole = keys.once(self._rivals)
        shape = keys.keys.shape[:3]
        out = torch.where(whole < 2, number / self.lag, torch.inf)[:, None].expand(shape)
        if slots.shape[1] >= 2 * self.lag:
            at = slots[:, None, :, None]
            score = sum(
                _stand_out(x.gather(2, at.expand(-1, shape[1], -1, x.shape[3])).float().unflatten(2, (-1, self.lag)))
                for x in (keys.keys, keys.values)
            )
            assert isinstance(score, Tensor)
            # ranks within the partition, so that each loses the same share
            rank = (ranks(score.argsort(dim=-1, stable=True)) / self.lag).flatten(2)
            mine = number.clamp(0, rank.shape[2] - 1)[:, None].expand(shape)
            out = torch.where((number < (whole - 1) * self.lag)[:, None], rank.gather(2, mine), out)
        return out.masked_fill((number < 0)[:, None], torch.inf).masked_fill(~keys.valid[:, None], -torch.inf)

    def _rivals(self, keys: KeyBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The slots of the keys after the sinks, as many as whole partitions may have, ``[B, n]`` long; the number of each key
        among those after the sinks, ``[B, K]`` long; and how many whole partitions a row has, ``[B, 1]`` long."""
        number = keys.valid.cumsum(1) - 1 - self.sinks
        rivals = keys.valid & (number >= 0)
        most = max(0, rivals.shape[1] - self.sinks) // self.lag * self.lag
        return true_first(rivals)[:, :most], number, rivals.sum(1, keepdim=True) // self.lag


def _stand_out(x: Tensor) -> Tensor:
    """``x [B, H, stretches, lag, D]`` -> ``[B, H, stretches - 1, lag]``, the scores of all partitions but the last."""
    behind = x[:, :, 1:]
    low, high = behind.amin(3, keepdim=True), behind.amax(3, keepdim=True)
    return ((x[:, :, :-1] - low) / (high - low)).std(-1).softmax(-1)
