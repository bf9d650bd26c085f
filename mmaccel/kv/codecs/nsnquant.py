"""NSNQuant: tokens of one length around zero, so that one set of levels fits all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

import torch
from mmaccel_kernels.pack import kept, meta_type, quantise
from mmaccel_kernels.pages import Code, Format, Pages, Plane, Remainder, turned, turned_back
from torch import Tensor

from ...method import register
from ._codebooks import levels
from .base import Codec, Cut


@register
class NSNQuant(Codec):
    """Keys and values in 1 to 4 bits around the mean of a page, of tokens that have the same length before and after.

    *NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV Cache*, NeurIPS 2025,
    arXiv 2505.18231.

    Tokens ``x [D]`` are scaled to the length ``sqrt(D)`` (normalise), the mean over the page is taken out of every channel
    (shift), and what is left is scaled to that length again (normalise) and rotated. Then every channel is nearly N(0, 1),
    whatever the model is, and needs no calibration: ``x = n1 (mean + n2 R^T codes)``. A token has two scales, ``n1`` and
    ``n1 n2``, a page the mean.

    A kernel in Triton reads pages as they are stored, and no loop in CUDA C++: by a count of instructions, a step over a long
    cache takes longer than one over keys in full precision.

    Parameters
    ----------
    bits : of a number. 2 or 1 in the paper.
    seed : of the rotation, a random one that is a Hadamard transform where the head size allows.
    page : tokens that share a mean, and are packed at once.
    residual : newest tokens in full precision.

    With heads of 128 channels and pages of 128 tokens, scales and means take .375 bits a number.

    Paper and program: the authors code 8 channels together by one codebook for normal numbers; here every channel has the
    Lloyd-Max levels of normal numbers (as ``turboquant``), whose error is larger at the same bits. No program of theirs was at
    hand: the page, which they call a residual block, has the size that other codecs have.
    """

    name = "nsnquant"
    summary = "1 to 4 bits of rotated tokens around the mean of a page, normalised twice"
    paper = "arXiv 2505.18231"
    limits = {"seed": "[0, inf)"}

    bits: Literal[1, 2, 3, 4] = 2
    seed: int = 0

    def formats(self, channels: int) -> tuple[Format, ...]:
        book = levels(self.bits, channels, "normal")
        return (Format(cast(Code, f"book{self.bits}"), "token", channels, seed=self.seed, book=book),)

    def packed_bits(self, channels: int) -> float:
        return super().packed_bits(channels) + 16 / channels + 16 / self.page

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        return (self._plane(keys, cut),)

    def value_planes(self, values: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        return (self._plane(values, cut),)

    def _plane(self, x: Tensor, cut: Cut) -> Plane:
        """``x [total, D]`` in codes, and the product of the lengths of tokens and the mean of their directions."""
        (format,), dtype = self.formats(x.shape[1]), meta_type(x.dtype)
        token = torch.arange(self.page, device=x.device)
        there = (token < cut.count[:, None])[..., None]
        tokens = x[torch.where(there[..., 0], cut.start[:, None] + token, 0)].float().masked_fill(~there, 0.0)
        length, mean = shifted(tokens, cut.count)
        # as they are stored, so that codes make up for their rounding
        length, turned_mean = kept(length, dtype), kept(turned(mean, format), dtype)
        mean = turned_back(turned_mean.float(), format)
        rest = (tokens - length.float() @ mean).masked_fill(~there, 0.0)
        start = torch.arange(len(tokens), device=x.device) * self.page
        flat = rest.flatten(0, 1).contiguous()
        plane = quantise(flat, start, cut.count, format, page=self.page, tile=cut.tile, meta_dtype=dtype)
        return replace(plane, rest=Remainder(length, turned_mean))


def shifted(tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square of every token, ``[N, page, 1]``, and the mean of the tokens that are divided by it, ``[N, 1, D]``, of
    pages ``tokens [N, page, D]`` float32, zero behind their ``count [N]`` tokens."""
    length = tokens.square().mean(-1, keepdim=True).sqrt()
    mean = (tokens / torch.where(length > 0, length, 1.0)).sum(1, keepdim=True) / count[:, None, None]
    return length, mean
