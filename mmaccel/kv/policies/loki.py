"""Loki: keys are ranked in the few dimensions in which they vary most, and those that rank highest are read in full."""

import torch
from mmaccel_kernels.loki import low_rank_logits
from mmaccel_kernels.quest import Join
from torch import Tensor

from ...method import KeyUnits, ReadingPolicy, ReadStep, register


@register
class Loki(ReadingPolicy):
    """Every decode step reads the visual keys with the largest logits in a low dimension; all keys stay stored.

    *Loki: Low-rank Keys for Efficient Sparse Attention*, NeurIPS 2024, arXiv 2406.02542.

    The principal components of the keys of every KV head are found once; query and keys meet in the first of them, without
    subtracting the mean. The keys in these dimensions are kept with the cache, ``dims`` of the keys' memory. The authors
    calibrate on a text corpus, here the components are those of the visual keys of the prompt itself; and they rank for every
    query head, here those of one KV head agree.

    Parameters
    ----------
    dims : components that are looked at, a number or a share of the head size. A quarter, as in the paper.
    reduce : how the query heads of a KV head agree on its keys: by the ``max`` of their logits, or by the ``mean``.
    """

    name = "loki"
    summary = "every decode step reads the visual keys with the largest logits in a low dimension"
    paper = "arXiv 2406.02542"
    default_retain = 0.25
    limits = {"dims": "[1, inf) or (0.0, 1.0]"}

    dims: float = 0.25
    reduce: Join = "max"

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``basis [B, Hkv, D, r]`` float32 and ``keys [B, Hkv, P, r]``, the visual keys in it."""
        there = units.there[..., 0, None]
        keys = units.keys[:, :, :, 0].float().masked_fill(~there, 0.0)
        basis = self.basis(keys, there)
        return {"basis": basis, "keys": (keys @ basis).to(units.keys.dtype)}

    def basis(self, keys: Tensor, there: Tensor) -> Tensor:
        """The first principal components ``[B, Hkv, D, r]`` of those of ``keys [B, Hkv, P, D]`` float32 that are ``there``,
        ``[B, 1 or Hkv, P, 1]``; the others are zero."""
        mean = keys.sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp(min=1)
        centred = (keys - mean).masked_fill(~there, 0.0)
        # by rising variance
        components: Tensor = torch.linalg.eigh(centred.mT @ centred).eigenvectors
        return components.flip(-1)[..., : self.rank(keys.shape[3])].contiguous()

    def rank(self, width: int) -> int:
        """Number of components that are compared where heads are ``width`` wide."""
        return min(width, self.dims if isinstance(self.dims, int) else max(1, int(self.dims * width + 0.5)))

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, Hkv, P]`` float32: logits in the low dimension."""
        return low_rank_logits(step.query, step.summary["basis"], step.summary["keys"], self.reduce)
