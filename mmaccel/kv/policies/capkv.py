"""CapKV: keep the keys whose values widen what the output of attention can be."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...method import KeyBatch, register
from ..scoring.copies import of_first_keys
from .expected_attention import ExpectedAttention
from .leverage import unexplained


@register
class CapKV(ExpectedAttention):
    """Score keys by their relevance to future queries, times the leverage of their value among all values so weighted.

    *CAPKV*, arXiv 2604.25975, after ``CapPress`` of kvpress, https://github.com/NVIDIA/kvpress.

    With ``m`` the mean query of the prompt at the next ``future`` positions (see ``expected-attention``), ``w_k = exp(tau
    (cos(k, m) - max cos))`` and ``A = I + sum_k (w_k + 1e-6) v_k v_k^T``, ``s_k = mean_{h in group} w_k v_k^T A^-1 v_k``. The
    first ``sinks`` keys stay and take no part.

    Parameters
    ----------
    tau : 5 as in kvpress, where the paper has a product in place of the cosine.
    future, sinks : 512 and 4 as in kvpress.
    """

    name = "capkv"
    summary = "keys that future queries may attend to, whose values are unlike the others"
    paper = "arXiv 2604.25975"
    limits = {"tau": "[0, inf)"}

    tau: float = 5.0

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.expected is not None
        heads, values = keys.keys.shape[1], keys.values.float()
        first = keys.valid.cumsum(1) <= self.sinks
        own = (keys.valid & ~first)[:, None]
        direction, among = normalize(keys.keys.float(), dim=-1), own[..., None]
        values = values.masked_fill(~among, 0.0)
        score = torch.zeros_like(values[..., 0])
        means = normalize(keys.expected[0].unflatten(1, (heads, -1)), dim=-1)
        for mean in means.unbind(2):
            cosine = (direction @ mean[..., None])[..., 0].clamp(-1, 1).masked_fill(~own, -torch.inf)
            most = cosine.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
            weight = (self.tau * (cosine - most)).exp()
            gram = (values * (weight + 1e-6)[..., None]).mT @ values
            score += weight * unexplained(values, gram, 1.0)
        score = of_first_keys(score / means.shape[2], keys.keys, keys.valid & ~first)
        return score.masked_fill((first & keys.valid)[:, None], torch.inf)
