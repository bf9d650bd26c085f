"""GEAR: codes, and what they lack as a product of thin matrices and single outliers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Literal, cast

import torch
from mmaccel_kernels.pack import kept, meta_type, quantise
from mmaccel_kernels.pages import Code, Format, Pages, Plane, Remainder
from torch import Tensor
from torch.nn.functional import pad

from ...core.masks import leftmost
from ...method import register
from .base import Codec, Cut, channel_group


@register
class GEAR(Codec):
    """Keys in groups of tokens per channel and values in groups of channels per token, with the largest errors stored apart and
    the others corrected by a matrix of low rank.

    *GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM*, arXiv 2403.05527.

    ``x ~ codes(x - outliers) + outliers + L R``. Outliers are the smallest and the largest numbers of every channel of keys
    over the tokens of a page, and of every token of values over its channels; they are stored exactly, and the mean takes their
    place before the others are quantised. ``L R`` is the best matrix of low rank for what is then missing in a page of a head,
    found by a power iteration.

    A kernel in Triton adds ``L R`` and the outliers to the codes of a few tokens at a time, for up to 16 columns of ``L`` and
    32 outliers of a channel or token; with more of them, a page is unpacked at every step that reads it. No loop in CUDA C++
    reads such pages: by a count of instructions, a step over a long cache takes longer than one over keys in full precision.
    Choose ``gear`` for answers at few bytes; ``kivi`` and ``turboquant`` have such loops.

    ``variant="official"``: outliers of values are those of all heads of a token together, as many as the program has, and as
    many outliers in every channel of keys. Room for all of them is kept in every head.

    Parameters
    ----------
    bits : 2, 4 or 8. 4, with which the paper is near lossless; it also has 2.
    rank : columns of ``L``; 4 as in the paper for prompts. 0 stores no product.
    sparsity : the share of numbers that are outliers, half of them the smallest and half the largest, at least one each in
        every channel or token; 0 is none, the paper's GEAR-L. 0.02 as in the paper.
    group : tokens (keys) or channels (values) that share a scale: the largest number that divides both this and the page, or
        the head size. 64 as in the program.
    rounds : of the power iteration; 3 as in the program.
    page : tokens that are packed at once and share ``L R``.
    residual : newest tokens in full precision.

    With heads of 128 channels the defaults take 4.5 bits a number for codes and scales, 1 for the products and .5 for outliers.

    Paper and program: the program has one product for a whole prompt, and one of rank 2 for every 64 tokens behind it; here
    every page has its own, of one rank. It takes as many outliers of a channel of keys, of however many tokens, as of a token.
    Its steps are only right for 2 and 4 bits, and it rounds what codes represent to half precision before it measures what is
    missing.
    """

    name = "gear"
    summary = "2, 4 or 8 bits, with outliers apart and the error corrected by a matrix of low rank"
    paper = "arXiv 2403.05527"
    limits = {"rank": "[0, inf)", "sparsity": "[0, 1)", "group": "[16, inf)", "rounds": "[1, inf)"}

    page: int = 128
    bits: Literal[2, 4, 8] = 4
    rank: int = 4
    sparsity: float = 0.02
    group: int = 64
    rounds: int = 3

    @property
    def mixes_heads(self) -> bool:
        """In the authors' variant outliers are those of all heads."""
        return self.official

    def formats(self, channels: int) -> tuple[Format, ...]:
        code = cast(Code, f"int{self.bits}")
        return Format(code, "channel", gcd(self.group, self.page)), Format(
            code, "token", channel_group(self.group, channels)
        )

    def tile_of(self, width: int) -> int:
        # of the kernel that adds to codes what they lack
        return 16

    def packed_bits(self, channels: int) -> float:
        at = torch.iinfo(_type(self.page, channels)).bits
        outliers = self.outliers(self.page) / self.page + self.outliers(channels) / channels
        product = 16 * min(self.rank, channels) * (1 / channels + 1 / self.page)
        return super().packed_bits(channels) + outliers * (16 + at) + product

    def outliers(self, size: int) -> int:
        """Number of the smallest of ``size`` numbers, and of the largest, that are stored apart."""
        return max(1, round(size * self.sparsity / 2)) if self.sparsity else 0

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        return (self._plane(keys, cut, self.formats(keys.shape[1])[0]),)

    def value_planes(self, values: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        return (self._plane(values, cut, self.formats(values.shape[1])[1]),)

    def _plane(self, x: Tensor, cut: Cut, format: Format) -> Plane:
        """``x [total, D]`` in codes of one format, with what they lack."""
        width, dtype, of_keys = x.shape[1], meta_type(x.dtype), format.axis == "channel"
        token = torch.arange(self.page, device=x.device)
        there = (token < cut.count[:, None])[..., None]
        true = x[torch.where(there[..., 0], cut.start[:, None] + token, 0)].float()

        def turned(pages: Tensor) -> Tensor:
            """``[N, page, D]`` with the numbers last among which outliers are found, and back."""
            return pages.mT if of_keys else pages

        lines, valid = turned(true), turned(there.expand_as(true))
        count = self.outliers(lines.shape[2])
        if self.official:
            count = int(int(cut.lengths.shape[1] * self.page * width * self.sparsity) / self.page / 2)
        find = self._extremes_of_heads if self.official and not of_keys else extremes
        apart, mean = find(lines, valid, count, cut)
        flat = turned(torch.where(apart, mean, lines)).reshape(-1, width).contiguous()
        start = torch.arange(len(true), device=x.device) * self.page
        plane = quantise(flat, start, cut.count, format, page=self.page, tile=cut.tile, meta_dtype=dtype)
        missing = (true - plane.decoded(self.page, cut.tile, None, None)).masked_fill(~there, 0.0)
        rest = Remainder()
        if self.rank:
            begin = first_directions(width, min(self.rank, width)).to(x.device, non_blocking=x.device.type != "cpu")
            product = low_rank(missing.masked_fill(turned(apart), 0.0), begin, self.rounds)
            # as kernels read them: a copy at every step would be a launch
            rest = Remainder(*(kept(part.contiguous(), dtype) for part in product))
        if count:
            slots, real = leftmost(apart, min(2 * count, lines.shape[2]))
            line = torch.arange(lines.shape[1], device=x.device)[:, None]
            place = slots * width + line if of_keys else line * width + slots
            value = turned(missing).gather(2, slots) * real
            rest = replace(
                rest, value=kept(value, dtype).flatten(1), place=place.flatten(1).to(_type(self.page, width))
            )
        return replace(plane, rest=rest if self.rank or count else None)

    @staticmethod
    def _extremes_of_heads(tokens: Tensor, valid: Tensor, count: int, cut: Cut) -> tuple[Tensor, Tensor]:
        """:func:`extremes` of ``tokens [N, page, D]`` among the channels of all heads of a row, of which the first tokens
        belong together, and so on."""
        (rows, heads), number = cut.lengths.shape, torch.arange(len(tokens), device=tokens.device)
        each = torch.zeros_like(cut.lengths.flatten()).index_add_(0, cut.head, torch.ones_like(cut.head))
        place = number - (each.cumsum(0) - each)[cut.head]
        table = number.new_full((rows * heads, int(each.max())), len(tokens))
        table[cut.head, place] = number

        def beside(x: Tensor) -> Tensor:
            """``[N, page, D]`` -> ``[B, pages, page, Hkv D]``."""
            return pad(x, (0, 0, 0, 0, 0, 1))[table.view(rows, heads, -1)].permute(0, 2, 3, 1, 4).flatten(3)

        apart, mean = extremes(beside(tokens), beside(valid), count)
        apart = apart.unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return apart[cut.head, place], mean[cut.head // heads, place]


def extremes(lines: Tensor, valid: Tensor, count: int, cut: Cut | None = None) -> tuple[Tensor, Tensor]:
    """The ``count`` smallest and the ``count`` largest numbers of every line, the lower place on a tie, and the mean.

    lines : ``[..., size]`` float32. valid : the same shape, bool; other numbers do not count.

    Returns ``[..., size]`` bool and ``[..., 1]``.
    """
    mean = lines.masked_fill(~valid, 0.0).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    ends = [x.masked_fill(~valid, torch.inf).argsort(dim=-1, stable=True)[..., :count] for x in (lines, -lines)]
    return torch.zeros_like(valid).scatter(-1, torch.cat(ends, -1), True) & valid, mean


def low_rank(x: Tensor, begin: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Factors ``[N, n, r]`` and ``[N, r, D]`` whose product is near ``x [N, n, D]``, by a power iteration that begins with the
    directions ``begin [..., D, r]``."""
    right = begin.expand(len(x), -1, -1)
    for _ in range(rounds):
        left = torch.linalg.qr(x @ torch.linalg.qr(right).Q).Q
        right = x.mT @ left
    return left, right.mT


@lru_cache(maxsize=16)
def first_directions(width: int, rank: int) -> Tensor:
    """Directions with which a power iteration begins, ``[width, rank]``, the same for all heads and pages."""
    with torch.inference_mode(False):
        return torch.rand(width, rank, generator=torch.Generator().manual_seed(0))


def _type(page: int, width: int) -> torch.dtype:
    """The type of the places of a page."""
    return torch.int16 if page * width <= 1 << 15 else torch.int32
