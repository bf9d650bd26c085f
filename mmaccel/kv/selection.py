"""Some of the keys that layers store: where they came from, and how they are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mmaccel_kernels.compact import Plan, compact_plan
from torch import Tensor
from torch.nn.functional import pad

from .index import leftmost


@dataclass(frozen=True)
class Selection:
    """Some slots of ``R`` rows; layers that store the same keys share it.

    order, there : ``[R, 1 or Hkv, W]``, the slots of every head, and which of these are slots at all.
    index : ``[R, 1 or Hkv, W]``, where they came from, -1 for none. lengths : ``[R, 1 or Hkv]`` long on the CPU.
    plan : how keys and values are gathered.
    """

    order: Tensor
    there: Tensor
    index: Tensor
    lengths: Tensor
    plan: Plan

    @staticmethod
    def of(index: Tensor, kept: Tensor, heads: int, lengths: Tensor | None = None) -> Selection:
        """Select what is ``kept [R, Hkv or 1, K]`` bool of ``heads`` with this ``index [R, 1 or Hkv, K]``. ``lengths [R, Hkv
        or 1]`` long on the CPU say how many that are, where it is known; else the host waits for it."""
        shape = (len(index), max(index.shape[1], kept.shape[1]), -1)
        index, kept = index.expand(shape), kept.expand(shape)
        kept = kept & (index >= 0)
        order, there, lengths = leftmost(kept, lengths)
        total = int(lengths.expand(-1, heads if shape[1] == 1 else shape[1]).sum())
        plan = compact_plan(kept.expand(-1, heads, -1), total)
        return Selection(order, there, index.gather(2, order).masked_fill(~there, -1), lengths, plan)

    @cached_property
    def bounds(self) -> Tensor:
        """``[R Hkv + 1]`` long, where every head begins in what is gathered, and where the last one ends."""
        return pad(self.plan.lengths.flatten().cumsum(0), (1, 0))

    def figures(self, received: Tensor | None) -> Tensor | None:
        """The figures ``[R, Hkv, W]`` of the slots, of those of all slots ``[R, Hkv, K]``; None of None."""
        if received is None:
            return None
        return received.gather(2, self.order.expand(-1, received.shape[1], -1)).masked_fill(~self.there, 0.0)
