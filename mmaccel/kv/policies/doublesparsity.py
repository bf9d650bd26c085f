"""Double Sparsity: keys are ranked in a few of their channels, in few bits, and those that rank highest are read in full."""

import torch
from mmaccel_kernels.quest import Join
from torch import Tensor

from ...method import KeyUnits, ReadingPolicy, ReadStep, register
from ...method.sparse_read import agree, by_kv_head


@register
class DoubleSparsity(ReadingPolicy):
    """Every decode step reads the visual keys with the largest logits in the heaviest channels; all keys stay stored.

    *Post-Training Sparse Attention with Double Sparsity*, arXiv 2408.07092.

    Of every key the ``D / group`` channels that weigh most are kept besides, its label, rounded to ``bits`` between the
    smallest and the largest of them, as is the query. The label's products with the query rank the keys. The authors
    calibrate the channels on a text corpus, by the mean of ``|q k|``, ``|q|`` or ``|k|``; here they are those of the largest
    mean ``|k|`` of the prompt's own visual keys. They rank for every query head, here those of one KV head agree.

    Parameters
    ----------
    group : channels for each one that is in the label. 8 as in the program's calls, 16 in the paper.
    bits : of a number of a label; 16 rounds nothing. 4 as in the program's calls.
    reduce : how the query heads of a KV head agree on its keys: by the ``max`` of their logits, or by the ``mean``.
    """

    name = "doublesparsity"
    summary = "every decode step reads the visual keys with the largest logits in a few heavy channels"
    paper = "arXiv 2408.07092"
    default_retain = 0.25
    limits = {"group": "[1, inf)", "bits": "[1, 16]"}

    group: int = 8
    bits: int = 4
    reduce: Join = "max"

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``channels [B, Hkv, r]`` long, and ``labels [B, Hkv, P, r]``, the visual keys in these channels."""
        there = units.there[..., 0, None]
        keys = units.keys[:, :, :, 0].float().masked_fill(~there, 0.0)
        channels = self.channels(keys)
        labels = keys.gather(3, channels[:, :, None].expand(-1, -1, keys.shape[2], -1))
        return {"channels": channels, "labels": self.rounded(labels).to(units.keys.dtype)}

    def channels(self, keys: Tensor) -> Tensor:
        """``[B, Hkv, r]`` long: the channels of the label, for ``keys [B, Hkv, P, D]`` float32; heaviest first."""
        order = keys.abs().sum(2).argsort(dim=-1, descending=True, stable=True)
        return order[..., : max(1, keys.shape[3] // self.group)]

    def rounded(self, x: Tensor) -> Tensor:
        """``x [..., r]`` float32 in steps of ``bits`` between its smallest and its largest entry."""
        if self.bits >= 16:
            return x
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = ((high - low) / (2**self.bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
        return ((x - low) / step).round() * step + low

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, Hkv, P]`` float32: logits of the labels."""
        labels, channels = step.summary["labels"].float(), step.summary["channels"]
        query = by_kv_head(step.query.float(), labels.shape[1])
        query = self.rounded(query.gather(3, channels[:, :, None].expand(-1, -1, query.shape[2], -1)))
        return agree(query @ labels.mT, self.reduce)
