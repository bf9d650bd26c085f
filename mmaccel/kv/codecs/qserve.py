"""QServe's KV4: every token in steps of its own, after large channels of keys were made smaller."""

from __future__ import annotations

from typing import Literal, cast

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

    Parameters
    ----------
    bits : 2, 4 or 8. 4 as in the paper.
    smooth : the power, 0.5 as in the paper; 0 leaves keys as they are.
    page : tokens of a page. Every token has its own steps, so the size does not affect the error.
    residual : newest tokens in full precision.

    Paper and program: there ``l`` is found on calibration data and folded into the weights before RoPE; here it is that of the
    first tokens that a head packs, and is used for later ones too. Weights and activations are not quantised here. The low
    bits of MiKV (arXiv 2402.18096) are these too; its balancer, ``sqrt(max |q| / max |k|)``, looks at queries as well.
    """

    name = "qserve"
    summary = "4 bits with steps of every token's own, large channels of keys moved to the queries"
    paper = "arXiv 2405.04532"
    limits = {"smooth": "[0, 1]"}

    page: int = 64
    bits: Literal[2, 4, 8] = 4
    smooth: float = 0.5

    def formats(self, channels: int) -> tuple[Format, ...]:
        return (Format(cast(Code, f"int{self.bits}"), "token", channels),)

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        if not self.smooth:
            return super().key_planes(keys, cut, before)
        size = largest(keys, cut.lengths.flatten())
        # RoPE turns channel c with channel c + D / 2
        half = size.shape[1] // 2
        size[:, : 2 * half] = size[:, :half].maximum(size[:, half : 2 * half]).repeat(1, 2)
        factor = factors_of(size**self.smooth, cut, None if before is None else before.keys[0].factor)
        return (scaled_plane(self, keys, cut, self.formats(keys.shape[1])[0], factor),)
