"""Non-causal attention: keep the keys that all queries of their stretch attend to, later ones and earlier ones."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from ...method import KeyBatch, LayerAttention, Policy, register
from ..scoring.chunks import to_back, to_front
from ..scoring.importance import by_group
from .leverage import standardised

#: entries of a block of logits
BLOCK = 1 << 22


@register
class NonCausalAttention(Policy):
    """Score keys by the attention of all queries in their stretch of ``stretch`` tokens, without a causal mask, times the
    norm of their value.

    *Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores*, arXiv 2507.08143, its second
    half.

    The prompt is cut into stretches; in each every query attends to every key. ``s_k = ||v_k||_2 mean_{h in group} sum_q
    A[h, q, k]``, averaged over 3 neighbours, in standard deviations above the mean of all heads and keys of the layer.

    ``variant="official"``: as kvpress has it. Logits are not scaled; where the last stretch is shorter, the padding that fills
    it up takes part in the softmax with logits of zero, as keys and as queries.

    Parameters
    ----------
    stretch : tokens of a stretch. 256 as in kvpress.
    """

    name = "noncausal-attention"
    summary = "keys that all queries around them attend to, before and behind, times the norm of their values"
    paper = "arXiv 2507.08143"
    default_retain = 0.25
    prompt_only = True
    mixes_heads = True
    limits = {"stretch": "[1, inf)"}

    stretch: int = 256

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        query, width = attention.query, attention.query.shape[2]
        valid = torch.ones_like(attention.text)
        if attention.visible is not None:
            valid = attention.visible.any(-1).any(1)
        valid = self.among(valid)
        key = attention.key[:, :, -width:]
        received = by_group(self._received(query, key, attention.scaling, valid), key.shape[1])
        return torch.cat([before[..., :-width], received], dim=-1)

    def among(self, valid: Tensor) -> Tensor:
        """``[B, K]`` bool: those of the ``valid [B, K]`` tokens of a prompt that are scored."""
        return valid

    def _received(self, query: Tensor, key: Tensor, scaling: float, valid: Tensor) -> Tensor:
        """``[B, Hq, K]`` float32: sums over the queries of each stretch; zero for keys that are not ``valid [B, K]``."""
        size, number = self.stretch, valid.shape[1]
        if number == 0:
            return query.new_zeros(query.shape[:3], dtype=torch.float32)
        behind = -number % size
        real = pad(to_front(valid[:, None], valid)[:, 0], (0, behind)).unflatten(1, (-1, size))
        query, key = (pad(to_front(x, valid).float(), (0, 0, 0, behind)).unflatten(2, (-1, size)) for x in (query, key))
        query = query.unflatten(1, (key.shape[1], -1))
        # a stretch without any key is none, and only its last one may be filled up
        used = real.any(-1)
        step, parts = max(1, BLOCK // max(1, query[:, :, :, 0, 0, 0].numel() * size * size)), []
        for first in range(0, real.shape[1], step):
            part = slice(first, first + step)
            logits = torch.einsum("bkgnqd,bknld->bkgnql", query[:, :, :, part], key[:, :, part])
            keys, queries = real[:, None, None, part, None], real[:, None, None, part, :, None]
            if self.official:
                logits = logits.masked_fill(~queries, 0.0).masked_fill(~keys, 0.0)
                counted = used[:, None, None, part, None, None]
            else:
                logits = (logits * scaling).masked_fill(~keys, -torch.inf)
                counted = queries
            parts.append(logits.softmax(-1).masked_fill(~counted, 0.0).sum(-2))
        sums = torch.cat(parts, dim=3).flatten(1, 2).flatten(2)[..., :number]
        return to_back(sums, valid).masked_fill(~valid[:, None], 0.0)

    def score(self, keys: KeyBatch) -> Tensor:
        return self.weighed(keys, keys.valid)

    def weighed(self, keys: KeyBatch, among: Tensor) -> Tensor:
        """``[B, Hkv, K]`` float32: the score of each key ``among [B, K]`` bool those."""
        assert keys.received is not None
        norms = torch.linalg.vector_norm(keys.values, dim=-1, dtype=torch.float32)
        score = (keys.received * norms).masked_fill(~among[:, None], 0.0)
        # in double precision, so that sums of the same few terms in another order are equal after rounding
        return standardised(avg_pool1d(score.double(), 3, stride=1, padding=1).float(), among)
