"""Compactor: leverage scores and non-causal attention."""

import torch
from torch import Tensor

from ...core.masks import suffix_sums
from ...method import KeyBatch, ModelFacts, register
from .leverage import Leverage, standardised
from .noncausal_attention import NonCausalAttention


@register
class Compactor(NonCausalAttention):
    """Score keys by non-causal attention and leverage together; the question does not matter.

    *Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores*, arXiv 2507.08143.

    ``s = s_attention + blend s_leverage``, the scores of ``noncausal-attention`` and of ``leverage``, both of the keys
    between the first ``sinks`` and the last ``recent`` alone, which stay.

    ``variant="official"``: see ``noncausal-attention``.

    Parameters
    ----------
    blend : the weight of the leverage; negative for the share of the keys that is evicted, as in kvpress by default.
    sketch : see ``leverage``. sinks, recent : 8 and 4 as in kvpress.
    """

    name = "compactor"
    summary = "keys that the queries around them attend to, or that other keys do not explain"
    paper = "arXiv 2507.08143"
    needs_unrotated = True
    limits = {"sketch": "[1, inf)", "blend": "(-inf, inf)"}

    sinks: int = 8
    recent: float = 4
    blend: float = -1.0
    sketch: int = 48

    def check(self, family: ModelFacts) -> None:
        """See :class:`~mmaccel.kv.policies.leverage.Leverage`."""
        super().check(family)
        self._leverage.check(family)

    @property
    def _leverage(self) -> Leverage:
        return Leverage(sketch=self.sketch)

    def among(self, valid: Tensor) -> Tensor:
        held = valid.sum(1, keepdim=True)
        last = self.recent if isinstance(self.recent, int) else (held * self.recent + 0.5).long()
        return valid & (valid.cumsum(1) > self.sinks) & (suffix_sums(valid) > last)

    def score(self, keys: KeyBatch) -> Tensor:
        among = self.among(keys.valid)
        leverage = standardised(self._leverage.leverage(keys, among), among)
        blend = torch.tensor(self.blend, device=leverage.device)
        if self.blend < 0 and keys.count is not None:
            rivals = (keys.valid if self.joint else keys.valid & keys.visual).sum(1).clamp(min=1)
            blend = (1 - keys.count / rivals).clamp(0, 1).to(leverage)[:, None, None]
        score = self.weighed(keys, among) + blend.abs() * leverage
        return score.masked_fill((keys.valid & ~among)[:, None], torch.inf)
