"""TurboQuant: rotated keys and values in Lloyd-Max codes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor
from typing import Literal, cast

import torch
from mmaccel_kernels.pack import Shared, meta_type, quantise
from mmaccel_kernels.pages import Code, Format, Pages, Plane
from torch import Tensor

from ...core.masks import true_first
from ...errors import MmaccelError
from ...method import register
from ._codebooks import Codebook, levels
from .base import Codec, Cut


@register
class TurboQuant(Codec):
    """Keys and values of every head rotated at random, each coordinate in the nearest of the levels that are best for normal
    numbers, with one scale a token.

    *TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate*, arXiv 2504.19874.

    ``y = R x`` with an orthogonal ``R``; ``c_i`` is the nearest Lloyd-Max level of ``y_i sqrt(D) / |y|``, and ``x ~ s R^T c``
    with ``s = |x| / |c|``. A coordinate of a rotated token is nearly normal whatever the token is, so nothing is calibrated, no
    channel needs a scale, and every token is coded alone. Queries are rotated instead of keys, and values are rotated back
    after they are summed.

    Parameters
    ----------
    bits : of keys, and of values unless ``value_bits`` says otherwise. 4 by default; the paper has 2.5 and 3.5 as well: the
        half of the channels with the largest mean size over the heads of a prompt has one bit more than the others, and each
        half a rotation and a scale of its own. Halves are read by a kernel in Triton, and no loop in CUDA C++ as those of whole
        bits are: by a count of instructions, a step over a long cache takes longer than one over keys in full precision.
    value_bits : of values; None for ``bits``.
    seed : of the rotation: a Hadamard transform after random signs (none for 0) where the number of channels is a power of 2,
        else the orthogonal factor of a random matrix.
    correct : ``s`` makes what is stored as long as the token; else it is ``|x| / sqrt(D)``, as in the paper, and shorter.
    codebook : ``normal``: the best levels for normal numbers. ``sphere``: for the exact density of a coordinate of a rotated
        token of ``D`` channels. ``three_sigma``: for normal numbers cut at 3, as in the package turboquant-vllm.
    values : ``rotated``, or ``uniform``: not rotated, and in equal steps from the smallest to the largest channel, as in vLLM.
    sketch : store values in one bit less, and the signs of random sums of what is left, from which that is estimated without
        bias. The error is larger, and such values are unpacked at every step: 123 operations a layer beside attention, where
        others take 2.
    page : tokens that are packed at once; a token has its own scale, so the size does not affect the error.
    residual : newest tokens in full precision.

    Paper and programs: the paper stores ``|x|``, and its second variant takes the sketch for keys too. That is not offered
    here: a softmax turns the larger error into wrong weights. vLLM divides levels by their norm when it reads them, which is
    the same as the scale here.
    """

    name = "turboquant"
    summary = "rotated keys and values in 2 to 4 bits, one scale for each token and head"
    paper = "arXiv 2504.19874"
    limits = {"bits": (2, 2.5, 3, 3.5, 4), "value_bits": (2, 2.5, 3, 3.5, 4), "seed": "[0, inf)"}

    bits: float = 4
    value_bits: float | None = None
    seed: int = 0
    correct: bool = True
    codebook: Codebook = "normal"
    values: Literal["rotated", "uniform"] = "rotated"
    sketch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = self.values == "rotated" and float(self.of_values).is_integer()
        if self.sketch and not plain:
            raise MmaccelError("turboquant sketches rotated values of whole bits; leave out sketch.")
        if self.values == "uniform" and not float(self.of_values).is_integer():
            raise MmaccelError("turboquant needs whole value_bits for values='uniform'.")

    @property
    def mixes_heads(self) -> bool:
        """All heads have the same halves of channels."""
        return not (float(self.bits).is_integer() and float(self.of_values).is_integer())

    @property
    def of_values(self) -> float:
        """Bits of values."""
        return self.bits if self.value_bits is None else self.value_bits

    def formats(self, channels: int) -> tuple[Format, ...]:
        if self.values == "uniform":
            return *self._of(self.bits, channels), Format(cast(Code, f"int{int(self.of_values)}"), "token", channels)
        less = 1 if self.sketch else 0
        planes = self._of(self.of_values - less, channels)
        if self.sketch:
            planes = (*planes, self._signs(channels))
        return *self._of(self.bits, channels), *planes

    def _of(self, bits: float, channels: int) -> tuple[Format, ...]:
        """Formats of the halves of channels, that of more bits first; of all, if they have as many."""
        if float(bits).is_integer():
            return (self._format(int(bits), channels),)
        more = round((bits - floor(bits)) * channels)
        return self._format(ceil(bits), more), self._format(floor(bits), channels - more)

    def _format(self, bits: int, channels: int) -> Format:
        book = levels(bits, channels, self.codebook)
        return Format(cast(Code, f"book{bits}"), "token", channels, seed=self.seed, book=book, corrected=self.correct)

    def _signs(self, channels: int) -> Format:
        return Format("sign", "token", channels, seed=self.seed + 1, sketch=True)

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        return self._planes(keys, cut, self._of(self.bits, keys.shape[1]), None if before is None else before.keys)

    def value_planes(self, values: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        if self.values == "uniform":
            return super().value_planes(values, cut, before)
        formats = self._of(self.of_values - (1 if self.sketch else 0), values.shape[1])
        planes = self._planes(values, cut, formats, None if before is None else before.values)
        return (*planes, self._left_over(values, cut, planes[0])) if self.sketch else planes

    def _planes(
        self, x: Tensor, cut: Cut, formats: tuple[Format, ...], before: tuple[Plane, ...] | None
    ) -> tuple[Plane, ...]:
        """The planes of ``x [total, D]``; which channels have more bits is settled by the first tokens of each row."""
        if len(formats) == 1:
            return (self.plane(x, cut, formats[0]),)
        heads = cut.lengths.shape[1]
        chosen = [] if before is None else [plane.channels for plane in before]
        if before is None or cut.new is not None:
            own = [c.repeat_interleave(heads, dim=0).int() for c in self.halves(x, cut.lengths, formats[0].group)]
            if before is None or cut.new is None:
                chosen = [*own]
            else:
                rows = cut.new.all(1).repeat_interleave(heads)[:, None]
                chosen = [
                    torch.where(rows, mine, old) for mine, old in zip(own, chosen, strict=True) if old is not None
                ]
        head = torch.repeat_interleave(cut.lengths.flatten(), output_size=len(x))
        planes = []
        for channels, format in zip(chosen, formats, strict=True):
            assert channels is not None
            picked = x.gather(1, channels.long()[head])
            planes.append(replace(self.plane(picked, cut, format), channels=channels))
        return tuple(planes)

    def halves(self, x: Tensor, lengths: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """The ``more`` channels of largest mean size over the heads and tokens of each row, and the others: ``[B, more]`` and
        ``[B, D - more]`` long, ascending.

        x : ``[total, D]``, flat. lengths : ``[B, Hkv]``.
        """
        # in double precision, so that equal channels tie
        size = torch.segment_reduce(x.double().abs(), "sum", lengths=lengths.sum(1), unsafe=True)
        high = size.argsort(dim=1, descending=True, stable=True)[:, :more].sort(1).values
        low = torch.ones_like(size, dtype=torch.bool).scatter_(1, high, False)
        return high, true_first(low)[:, : x.shape[1] - more]

    def _left_over(self, x: Tensor, cut: Cut, coded: Plane) -> Plane:
        """Signs of random sums of what ``coded`` lacks of ``x [total, D]``, and scales by which they estimate it."""
        form, width, page = self._signs(x.shape[1]), x.shape[1], self.page
        back = coded.decoded(page, cut.tile, None, None)
        token = torch.arange(page, device=x.device)
        there = token < cut.count[:, None]
        at = torch.where(there, cut.start[:, None] + token, 0)
        rest = (x.float()[at] - back) * there[..., None]
        # the estimate is sqrt(pi / 2) / m |r| G^T s, and signs are two halves of a scale apart
        scale = rest.square().sum(-1, keepdim=True).sqrt() * (2 * (torch.pi / 2) ** 0.5 / width)
        own = torch.arange(len(cut.count), dtype=torch.int32, device=x.device)
        scale = scale.to(meta_type(x.dtype))
        full = torch.full_like(cut.count, page)
        flat = rest.flatten(0, 1).contiguous()
        return quantise(flat, own.long() * page, full, form, page=page, tile=cut.tile, shared=Shared(scale, None, own))
