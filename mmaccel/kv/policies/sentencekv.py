"""SentenceKV: rows or frames are read as wholes, those whose mean key the query matches best."""

import torch
from torch import Tensor

from ...method import KeyUnits, ReadingPolicy, ReadStep, register
from ...method.sparse_read import GroupsBy
from .clusterkv import by_centroid
from .squeezed_attention import _members


@register
class SentenceKV(ReadingPolicy):
    """Every decode step reads the visual keys of the rows or frames that it matches best; all keys stay stored.

    *SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching*, COLM 2025, arXiv 2504.00970.

    The paper groups the keys of a prompt by its sentences. Visual tokens have rows and frames instead. A group is represented
    by its mean key in every KV head. A step reads groups in falling order of ``q . mean`` until the budget is met exactly, of
    the last group the first keys. With ``offload="host"`` mean keys stay on the device and keys move to the host, as in the
    paper. ``clusterkv`` chooses likewise among clusters.

    Parameters
    ----------
    group : what belongs together: a ``row`` of a grid, a ``frame``, or a ``picture``, which is a picture, a tile or a clip.
    layer : layers before this one read everything. None as in the program.

    Paper and program: the query is the mean over the sentence that is being written, here that of the step; the program evicts
    a prompt's keys to five times the budget beforehand by the rule of ``snapkv``, here all stay. Query heads choose for
    themselves there, here those of one KV head agree on the best of their products. Text is always read; the 32 first and 32
    newest keys that the program always reads are mostly text, else say so with ``sinks`` and ``recent``.
    """

    name = "sentencekv"
    summary = "every decode step reads the rows or frames whose mean keys it matches best"
    paper = "arXiv 2504.00970"
    default_retain = 0.25

    group: GroupsBy = "row"

    @property
    def groups_by(self) -> GroupsBy:
        return self.group

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``labels [B, Hkv, P]`` int32, the group of every key, and ``centroids [B, Hkv, G, D]`` float32, their mean keys."""
        assert units.group is not None
        there = units.there[..., 0].expand(units.keys.shape[:3])
        labels = units.group.expand(there.shape)
        keys = units.keys[:, :, :, 0].float().masked_fill(~there[..., None], 0.0)
        sums, sizes = _members(keys, torch.where(there, labels, units.groups), units.groups)
        return {"labels": labels.contiguous(), "centroids": sums / sizes.clamp(min=1)[..., None]}

    def rate(self, step: ReadStep) -> Tensor:
        return by_centroid(step)
