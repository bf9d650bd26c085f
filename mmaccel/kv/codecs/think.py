"""ThinK: keys without the channels that matter least to queries, and KIVI for the rest."""

from dataclasses import replace
from typing import Literal

import torch
from mmaccel_kernels.pages import Pages, Plane
from torch import Tensor

from ...method import register
from .base import Cut
from .kivi import KIVI


@register
class ThinK(KIVI):
    """The channels of every key head with the least query-key energy are dropped; the others are quantised as by KIVI.

    *ThinK: Thinner Key Cache by Query-Driven Pruning*, ICLR 2025, arXiv 2407.21018.

    ``e_c = mean_q q_c^2 mean_t k_c^2`` over the last queries of the prompt (mean over the query heads of a key head) and the
    keys that are packed; the ``int(D prune)`` channels of lowest energy are dropped from all keys of the head, and count as
    zero in ``q . k``. Values keep all channels. The channels chosen for a prompt are used for later tokens too.

    Parameters
    ----------
    prune : share of the channels of keys to drop. 0.4 as in the paper.
    bits : 4, or 2 or 8, see ``kivi``; the paper also combines its pruning with KIVI.
    align : the number of channels that stay is rounded up to a multiple of this, so that a GPU loads keys in whole words. The
        program has 1.
    residual : the newest tokens keep all channels, in full precision. 32 as in the paper.

    Paper and program: both mainly prune keys in full precision; here pages always hold codes (``bits=8`` is close to full
    precision). Keys that are not packed yet have no part in ``e_c``; in the program they do.
    """

    name = "think"
    summary = "keys without 40 % of their channels, in 4 bits as by kivi"
    paper = "arXiv 2407.21018"
    limits = {"prune": "[0, 1)", "align": "[1, inf)"}

    residual: int = 32
    bits: Literal[2, 4, 8] = 4
    prune: float = 0.4
    align: int = 16

    @property
    def window(self) -> int:
        return 32

    def left(self, width: int) -> int:
        """Number of channels of a key that stay."""
        return min(width, -(-(width - int(width * self.prune)) // self.align) * self.align)

    def tile_of(self, width: int) -> int:
        """As for all channels, if those that stay are whole words."""
        return super().tile_of(width) if self.left(width) % 16 == 0 else self.tile

    def channels(self, keys: Tensor, cut: Cut) -> Tensor:
        """The channels that stay, ``[B Hkv, D']`` int32, ascending; ``keys [total, D]``, flat."""
        lengths, width = cut.lengths.flatten(), keys.shape[1]
        # in double precision, so that equal channels of equal keys tie, however many keys are summed
        summed = torch.segment_reduce(keys.double() ** 2, "sum", lengths=lengths, unsafe=True)
        energy = summed / lengths.clamp(min=1)[:, None]
        if cut.query_energy is not None:
            energy = energy * cut.query_energy.double().flatten(0, 1)
        # stable: the lower of two equal channels stays
        order = energy.argsort(dim=1, descending=True, stable=True)
        return order[:, : self.left(width)].sort(1).values.int()

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        chosen = before.keys[0].channels if before is not None else self.channels(keys, cut)
        if chosen is not None and cut.new is not None:
            chosen = torch.where(cut.new.flatten()[:, None], self.channels(keys, cut), chosen)
        if chosen is None or chosen.shape[1] == keys.shape[1]:
            return super().key_planes(keys, cut, before)
        head = torch.repeat_interleave(cut.lengths.flatten(), output_size=len(keys))
        picked = keys.gather(1, chosen.long()[head])
        return (replace(self.plane(picked, cut, self.formats(keys.shape[1])[0]), channels=chosen),)
