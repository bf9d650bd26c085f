"""QServe's KV4: every token in steps of its own, after large channels of keys were made smaller."""

from __future__ import annotations

from typing import Literal, cast

import torch
from mmaccel_kernels.pages import Code, Format, Pages, Plane
from torch import Tensor

from ...method import register
from .base import Codec, Cut, factors_of, largest, scaled_plane


@register
class QServe(Codec):
    """Every token of every head in equal steps between its smallest and its largest channel; channels of keys are balanced
    first, and queries multiplied by what keys were divided by.

    *QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving*, MLSys 2025, arXiv 2405.04532.

    ``l_c = (max_t |k_tc|)^smooth``, the larger one of the two channels that RoPE turns together (SmoothAttention);
    ``s = (max_c - min_c) / (2^bits - 1)`` and ``z = min_c`` of ``k_t / l``, ``c = round((x - z) / s)``, ``k_t ~ l (c s + z)``,
    and ``q . k = (q l) . (k / l)``. Values are coded the same without ``l``. A token is packed alone, so none waits for others.

    ``balance="queries"`` is the balancer of MiKV (*No Token Left Behind*, arXiv 2402.18096), which looks at all queries of the
    prompt as well: ``l_c = (max_t |k_tc|)^smooth / (max_t |q_tc|)^(1 - smooth)``, so that a step weighs as much in ``q . k``
    in every channel. The queries are those of all query heads of a key head, and no two channels share their ``l``.

    Parameters
    ----------
    bits : 2, 3, 4 or 8. 4 as in the paper; codes of 3 bits fill pages of 128 tokens.
    smooth : the power, 0.5 as in the paper; 0 leaves keys as they are.
    balance : ``keys``, or ``queries`` too.
    page : tokens of a page. Every token has its own steps, so the size does not affect the error.
    residual : newest tokens in full precision.

    Paper and program: there ``l`` is found on calibration data and folded into the weights before RoPE; here it is that of the
    first tokens that a head packs, and is used for later ones too. Weights and activations are not quantised here.
    """

    name = "qserve"
    summary = "4 bits with steps of every token's own, large channels of keys moved to the queries"
    paper = "arXiv 2405.04532"
    limits = {"smooth": "[0, 1]"}

    page: int = 64
    bits: Literal[2, 3, 4, 8] = 4
    smooth: float = 0.5
    balance: Literal["keys", "queries"] = "keys"

    @property
    def window(self) -> int | None:
        return None if self.balance == "queries" else 0

    def energy(self, queries: Tensor, valid: Tensor, heads: int) -> Tensor:
        """The largest square of every channel."""
        asked = queries.masked_fill(~valid[:, None, :, None], 0.0).abs().amax(2).float()
        return asked.unflatten(1, (heads, -1)).amax(2) ** 2

    def formats(self, channels: int) -> tuple[Format, ...]:
        return (Format(cast(Code, f"int{self.bits}"), "token", channels),)

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        if not self.smooth and self.balance == "keys":
            return super().key_planes(keys, cut, before)
        size = largest(keys, cut.lengths.flatten())
        if self.balance == "keys":
            # RoPE turns channel c with channel c + D / 2
            half = size.shape[1] // 2
            size[:, : 2 * half] = size[:, :half].maximum(size[:, half : 2 * half]).repeat(1, 2)
        factor = size**self.smooth
        if cut.query_energy is not None:
            asked = cut.query_energy.flatten(0, 1)
            asked = torch.where(asked > 0, asked, 1.0) ** ((1 - self.smooth) / 2)
            # within what float16 holds
            factor = (factor / asked).clamp(2**-12, 2**12)
        factor = factors_of(factor, cut, None if before is None else before.keys[0].factor)
        return (scaled_plane(self, keys, cut, self.formats(keys.shape[1])[0], factor),)
