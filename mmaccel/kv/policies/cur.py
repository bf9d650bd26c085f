"""CurDKV: keep the keys whose own norm and whose value's norm stand out among their neighbours."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...method import KeyBatch, Policy, register
from ..scoring.chunks import to_back, to_front
from ..scoring.random_projection import gaussian


@register
class CUR(Policy):
    """Score keys by approximate leverage scores of keys and values; needs no attention.

    *Value-Guided KV Compression for LLMs via Approximated CUR Decomposition* (CurDKV), arXiv 2509.15038.

    With ``a_k = ||k||^2`` and ``b_k = ||v||^2``, each over its sum in the same stretch of ``local`` keys, ``s_k = a_k b_k``,
    over its sum.

    Parameters
    ----------
    leverage : ``product`` as above, ``mean`` of ``a`` and ``b``, ``key`` or ``value`` for one of them. ``product`` as in
        kvpress.
    local : keys of a stretch; 0 for one stretch. 16 as in kvpress.
    project : dimensions of a Gaussian projection of keys and values before their norms are taken; 0 for none, as in kvpress by
        default; 20 there otherwise. The same numbers are drawn every time.
    sinks : 4 as in kvpress.
    """

    name = "cur"
    summary = "keys and values with large norms among their neighbours; needs no attention"
    paper = "arXiv 2509.15038"
    default_retain = 0.25
    limits = {"local": "[0, inf)", "project": "[0, inf)"}

    sinks: int = 4
    leverage: Literal["product", "mean", "key", "value"] = "product"
    local: int = 16
    project: int = 0

    def score(self, keys: KeyBatch) -> Tensor:
        key, value = (self._share(x, keys.valid) for x in (keys.keys, keys.values))
        score = {"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[self.leverage]
        return score / score.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)

    def _share(self, x: Tensor, valid: Tensor) -> Tensor:
        """``[B, Hkv, K]`` float32: the squared norms of ``x [B, Hkv, K, D]`` over their sum in each stretch."""
        if self.project:
            x = x.float() @ gaussian(x.shape[3], self.project, x.device) / math.sqrt(self.project)
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square().masked_fill(~valid[:, None], 0.0)
        if not self.local:
            return norms
        front = to_front(norms, valid)
        cut = pad(front, (0, -front.shape[2] % self.local)).unflatten(2, (-1, self.local))
        share = cut / cut.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return to_back(share.flatten(2)[..., : norms.shape[2]], valid)
