"""StreamingTOM: parked frames take 4 or 2 bits a number, and a question recalls those with the largest cosine."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ...method import RecallPolicy, register
from ...method.recall import Packed


@register
class StreamingTOM(RecallPolicy):
    """The online quantised memory: every parked frame is packed, and unpacked only where a question recalls it.

    *StreamingTOM: Streaming Token Compression for Efficient Video Understanding*, arXiv 2510.18269.

    Keys and values are packed channel by channel over the tokens of a frame: ``step = max((max - min) / (2^bits - 1), 1e-8)``
    and ``code = round((x - min) / step)``. The rating of a frame in a layer is the cosine of the question's mean query, over
    the query heads of each KV head and over its tokens, and the mean key before packing, KV heads side by side, both with RoPE.
    The causal reduction of every frame to as many tokens is ``streamingtom-ctr``.

    Parameters
    ----------
    bits : 4 as in the paper, or 2.
    contiguous : keys keep the positions that they were written with, as in the program.
    """

    name = "streamingtom"
    summary = "frames in 4 bits, those with the largest cosine of mean key and question"
    paper = "arXiv 2510.18269"
    default_retain = 0.25
    unrotated = False

    bits: Literal[4, 2] = 4
    contiguous: bool = False

    def rate(self, query: Tensor, frames: Tensor) -> Tensor:
        asked = query.unflatten(0, (frames.shape[1], -1)).mean((1, 2)).flatten()
        return normalize(frames.flatten(1), dim=1) @ normalize(asked, dim=0)

    def pack(self, x: Tensor) -> Packed:
        """Codes ``[Hkv, ceil(n bits / 8), D]`` uint8, the first token in the low bits; steps and minima ``[Hkv, D]``; and an
        empty tensor of the dtype of ``x``."""
        given, x = x, x.float()
        if not x.shape[1]:
            return x.to(torch.uint8), x.new_ones(len(x), x.shape[2]), x.new_zeros(len(x), x.shape[2]), given
        low = x.amin(1)
        step = ((x.amax(1) - low) / (2**self.bits - 1)).clamp(min=1e-8)
        codes = ((x - low[:, None]) / step[:, None]).round().to(torch.uint8)
        each = 8 // self.bits
        codes = pad(codes, (0, 0, 0, -x.shape[1] % each)).unflatten(1, (-1, each))
        shifts = torch.arange(each, dtype=torch.uint8)[:, None] * self.bits
        return (codes << shifts).sum(2, dtype=torch.uint8), step, low, given[:, :0]

    def unpack(self, packed: Packed, count: int) -> Tensor:
        codes, step, low, like = packed
        shifts = torch.arange(8 // self.bits, dtype=torch.uint8)[:, None] * self.bits
        numbers = ((codes[:, :, None] >> shifts) & (2**self.bits - 1)).flatten(1, 2)[:, :count]
        return (numbers * step[:, None] + low[:, None]).to(like.dtype)
