"""Keyformer: attention with a temperature that rises while decoding, and with noise."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ...method import LayerAttention, register
from ...method.blocks import row_blocks
from ..scoring.importance import by_group, column_sums
from ..scoring.noise import gumbel
from .h2o import H2O


@register
class Keyformer(H2O):
    """H2O whose attention is a Gumbel softmax: logits get noise, and are divided by a temperature.

    *Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference*, MLSys 2024, arXiv
    2403.09054.

    ``s_k = sum_q softmax_k((x[h, q, k] + z) / t)``, where ``x`` are the logits, ``z`` has a Gumbel distribution, and ``t =
    tau + n slope`` for the ``n``-th token of the answer, ``tau`` for the prompt. The paper evicts at every step (``every=1,
    joint=True``, ``recent`` 30 % of the budget, less the slot of the token to come in the program).

    Parameters
    ----------
    tau : 1 as in the paper.
    slope : the rise of the temperature with every token; the paper goes from 1 to 2 over an answer.
    noise : the weight of ``z``, 1 in the paper. Here 0, with which equal keys have equal scores. The noise is a function of the
        layer's head and the places of query and key, so that it is the same every time.
    gqa : see ``h2o``.
    """

    name = "keyformer"
    summary = "keys with most attention, by a softmax whose temperature rises while decoding"
    paper = "arXiv 2403.09054"
    needs_age = True
    limits = {"tau": "(0, inf)", "slope": "[0, inf)", "noise": "[0, inf)"}

    gqa: Literal["mean", "max", "sum"] = "mean"
    tau: float = 1.0
    slope: float = 0.01
    noise: float = 0.0

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        query = attention.query
        heat = torch.full(query.shape[:1] + query.shape[2:3], self.tau, device=query.device)
        if attention.age is not None:
            heat = heat + self.slope * (attention.age + 1)
        if self.noise:
            sums = self._noisy(attention, heat)
        else:
            # a temperature divides logits as a shorter query does
            plain = self.tau == 1 and attention.age is None
            warm = attention if plain else replace(attention, query=query.float() / heat[:, None, :, None])
            sums = column_sums(warm)
        return before + by_group(sums, before.shape[1], self.gqa)

    def _noisy(self, attention: LayerAttention, heat: Tensor) -> Tensor:
        """``[B, Hq, K]`` float32: sums of the softmax of logits with noise."""
        sums = attention.query.new_zeros(*attention.query.shape[:2], attention.key.shape[2], dtype=torch.float32)
        for start, stop in row_blocks(attention):
            logits = attention.logits(start, stop)
            rows = attention.places[:, start:stop] if attention.places is not None else torch.arange(start, stop)[None]
            z = gumbel(rows.to(logits.device), logits.shape[1], logits.shape[3])
            warm = (logits + self.noise * z) / heat[:, None, start:stop, None]
            sums += warm.softmax(-1).nan_to_num(0.0).sum(2)
        return sums
