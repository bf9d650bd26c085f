"""KIVI: keys per channel, values per token."""

from typing import Literal, cast

from mmaccel_kernels.pages import Code, Format

from ...method import register
from .base import Codec, channel_group


@register
class KIVI(Codec):
    """Keys in groups of tokens per channel, values in groups of channels per token, the newest tokens in full precision.

    *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache*, ICML 2024, arXiv 2402.02750.

    ``s = (max - min) / (2^bits - 1)``, ``z = min``, ``c = round((x - z) / s)``, ``x ~ c s + z`` in every group. A few channels
    of the keys are large for all tokens, so keys are quantised per channel; values have no such channels. Keys are quantised
    after RoPE.

    Parameters
    ----------
    bits : 2, 4 or 8. 2 as in the paper's main results.
    group : tokens (keys) or channels (values) that share a scale; for channels, the largest group that divides both this and
        the head size. 32 as in the paper.
    page : tokens that are quantised at once; 128, the length of the paper's residual.
    residual : newest tokens that stay in full precision; 128 as in the paper, where this holds for the values.

    Paper and program: in the program keys stay in full precision until there are 128 of them, values one by one until they
    are older than 128 tokens. Here keys and values of a page are quantised together, when both may be: at least 128 and at
    most 255 of the newest tokens are in full precision. The codes of a group are the same. The program divides by zero
    where all numbers of a group are equal; here they are restored exactly.
    """

    name = "kivi"
    summary = "2, 4 or 8 bits, keys per channel and values per token"
    paper = "arXiv 2402.02750"
    limits = {"group": "[1, inf)"}

    residual: int = 128
    bits: Literal[2, 4, 8] = 2
    group: int = 32

    def formats(self, channels: int) -> tuple[Format, ...]:
        code = cast(Code, f"int{self.bits}")
        return Format(code, "channel", self.group), Format(code, "token", channel_group(self.group, channels))
