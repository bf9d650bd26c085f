"""Recycled Attention: the keys that got most attention in one step are read in the steps behind it."""

import torch
from torch import Tensor

from ...method import Picked, ReadingPolicy, ReadStep, register
from ...method.sparse_read import agree, best, by_kv_head, keep_for


@register
class RecycledAttention(ReadingPolicy):
    """Every ``refresh`` steps the visual keys with most attention are found, and the steps until then read the same.

    *Recycled Attention: Efficient inference for long-context language models*, arXiv 2411.05787.

    A step that chooses computes the attention of its query to all visual keys; the authors take the largest weight of the query
    heads of a KV head. Until the next one steps read these keys and all text. In the paper a step that chooses attends to
    everything; here it reads what it chose, as every step stays within the budget. With ``refresh=1`` this is the exact top-k
    of every step.

    Parameters
    ----------
    refresh : steps that a choice serves. The paper tries 10 to 50, and as few as 1 where an answer changes its subject.
    reduce : how the query heads of a KV head agree on its keys: by the ``max`` of their weights, or by the ``mean``.
    """

    name = "recycled-attention"
    summary = "every few steps the visual keys with most attention are found, and read until the next time"
    paper = "arXiv 2411.05787"
    default_retain = 0.2
    limits = {"refresh": "[1, inf)", "reduce": ("max", "mean")}

    refresh: int = 4
    reduce: str = "max"

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, Hkv, P]`` float32: attention to the visual keys."""
        slots = step.slots[..., 0].clamp(min=0).long().expand(-1, step.keys.shape[1], -1)
        keys = step.keys.gather(2, slots[..., None].expand(-1, -1, -1, step.keys.shape[3])).float()
        keys = keys.masked_fill(step.gone[..., None], 0.0)
        logits = by_kv_head(step.query.float(), keys.shape[1]) @ keys.mT * step.scaling
        logits = logits.masked_fill(step.gone[:, :, None], torch.finfo(logits.dtype).min)
        return agree(logits.softmax(-1), self.reduce)

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """The best keys, every ``refresh`` steps."""
        return keep_for(best(self.rate(step), step), step, self.refresh)
