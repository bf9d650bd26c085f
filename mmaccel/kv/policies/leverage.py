"""Leverage scores: keep the keys that the others explain least."""

import math

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...method import KeyBatch, ModelFacts, Policy, register
from ..scoring.copies import of_first_keys
from ..scoring.random_projection import gaussian

#: added to the diagonal of the Gram matrix; where the sketch is wider than a head, it decides the scores
JITTER = 0.01


@register
class Leverage(Policy):
    """Score keys by approximate statistical leverage before RoPE; needs no attention.

    *Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores*, arXiv 2507.08143, its first
    half.

    The keys before RoPE, less their mean, are projected to ``sketch`` dimensions by a Gaussian matrix, ``X``; the leverage of
    key ``k`` is ``x_k (X^T X + 0.01 I)^-1 x_k``, and the score is how many standard deviations it lies above the mean of all
    heads and keys of the layer.

    Parameters
    ----------
    sketch : 48 as in kvpress. The same numbers are drawn every time, one matrix for all heads; in kvpress each head draws its
        own at every call.
    """

    name = "leverage"
    summary = "keys that the other keys explain least, before RoPE; needs no attention"
    paper = "arXiv 2507.08143"
    default_retain = 0.25
    prompt_only = True
    needs_unrotated = True
    mixes_heads = True
    limits = {"sketch": "[1, inf)"}

    sketch: int = 48

    def check(self, family: ModelFacts) -> None:
        """Refuse models without a separate key projection, whose outputs are the keys before RoPE."""
        super().check(family)
        if any(not hasattr(family.attention_in(layer), "k_proj") for layer in family.attending):
            raise UnsupportedError(
                f"{self.name} looks at keys before RoPE, and this model has layers without a k_proj where they come from; use "
                "keydiff."
            )

    def score(self, keys: KeyBatch) -> Tensor:
        return standardised(self.leverage(keys, keys.valid), keys.valid)

    def projection(self, keys: Tensor) -> Tensor:
        """``[D, sketch]`` float32, for ``keys [B, Hkv, K, D]``."""
        return gaussian(keys.shape[3], self.sketch, keys.device) / math.sqrt(self.sketch)

    def leverage(self, keys: KeyBatch, among: Tensor) -> Tensor:
        """``[B, Hkv, K]`` float32: the leverage of each key ``among [B, K]`` bool those; zero for the others."""
        assert keys.unrotated is not None
        own = among[:, None, :, None]
        x = keys.unrotated.float()
        mean = x.masked_fill(~own, 0.0).sum(2, keepdim=True) / own.sum(2, keepdim=True).clamp(min=1)
        x = (x - mean).masked_fill(~own, 0.0) @ self.projection(x)
        return of_first_keys(unexplained(x, x.mT @ x, JITTER).clamp(min=0), keys.unrotated, among)


def unexplained(x: Tensor, gram: Tensor, ridge: float) -> Tensor:
    """``[..., K]``: ``x_k (gram + ridge I)^-1 x_k`` for every row of ``x [..., K, D]``, with ``gram [..., D, D]``, float32."""
    factor, _ = torch.linalg.cholesky_ex(gram + ridge * torch.eye(gram.shape[-1], device=x.device))
    return (x * torch.cholesky_solve(x.mT, factor).mT).sum(-1)


def standardised(score: Tensor, among: Tensor) -> Tensor:
    """``score [B, Hkv, K]`` in standard deviations above its mean over the keys ``among [B, K]`` bool of all heads."""
    own = among[:, None].expand_as(score)
    number = own.sum((1, 2), keepdim=True)
    mean = score.masked_fill(~own, 0.0).double().sum((1, 2), keepdim=True) / number.clamp(min=1)
    spread = (score.double() - mean).masked_fill(~own, 0.0).square().sum((1, 2), keepdim=True)
    deviation = (spread / (number - 1).clamp(min=1)).sqrt().clamp(min=1e-6)
    return ((score - mean) / deviation).float()
