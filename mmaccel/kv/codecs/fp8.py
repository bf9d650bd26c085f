"""FP8: 8-bit floating point numbers."""

from mmaccel_kernels.pages import Format

from ...method import register
from .base import Codec


@register
class FP8(Codec):
    """Every token of every head in e4m3 with its own scale.

    *FP8 Formats for Deep Learning*, arXiv 2209.05433.

    ``s_t = max_d |x_td| / 448``, ``x ~ s_t e4m3(x / s_t)``: with 3 bits of mantissa the error of a number is at most a 16th
    of it, for small numbers 2^-19 of the largest of its token. Half the bytes of 16-bit storage, plus 16 bits per token.

    Parameters
    ----------
    page : tokens per page. Every token has its own scale, so the size does not affect the error.
    residual : newest tokens in full precision.

    The paper scales whole tensors by calibrated factors; here nothing is calibrated and the scale is per token and head.
    """

    name = "fp8"
    summary = "8-bit floats, one scale for each token and head"
    paper = "arXiv 2209.05433"

    page: int = 64

    def formats(self, channels: int) -> tuple[Format, ...]:
        return (Format("fp8", "token", channels),)
