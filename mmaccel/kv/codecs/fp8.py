"""FP8: eight bits with an exponent."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel_kernels.pages import Format

from ...method.registry import register
from .base import Codec


@register
@dataclass(frozen=True)
class FP8(Codec):
    """Every token of every head as e4m3 numbers with a scale of its own.

    *FP8 Formats for Deep Learning*, arXiv 2209.05433.

    ``s_t = max_d |x_td| / 448``, ``x ~ s_t e4m3(x / s_t)``: 3 bits of mantissa, so the error of a number is at most a 16th
    of it, of small ones a 2^19th of the largest of its token. Half of the bytes of 16-bit storage, and 16 bits a token.

    Parameters
    ----------
    page : tokens of a page; a token has a scale of its own, so the size of a page has no part in the error.
    residual : newest tokens in full precision.

    The paper scales whole tensors by calibrated factors; nothing is calibrated here, so the scale is per token and head.
    """

    name = "fp8"
    summary = "8-bit floats, one scale for each token and head"
    paper = "arXiv 2209.05433"

    page: int = 64

    def formats(self, channels: int) -> tuple[Format, ...]:
        """One format for keys and values."""
        return (Format("fp8", "token", channels),)
