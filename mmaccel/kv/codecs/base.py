"""What a codec is: how keys and values are stored in few bits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import gcd

import torch
from mmaccel_kernels.pack import quantise
from mmaccel_kernels.pages import Format, Pages, Plane, split
from torch import Tensor

from ...errors import MmaccelError
from ...method import Method


@dataclass(frozen=True)
class Cut:
    """Flat ragged heads cut into pages.

    start, count : ``[N]`` long and int32, first row and tokens of every page, head after head.
    head : ``[N]`` long, the head of every page, of ``B Hkv``.
    lengths : ``[B, Hkv]`` long.
    """

    start: Tensor
    count: Tensor
    head: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Codec(Method):
    """A method at site ``codec``: stores keys and values in pages of few bits, each page quantised once.

    Parameters
    ----------
    page : tokens of a page, a multiple of 16.
    residual : how many of the newest tokens always stay in full precision; with them stays what does not fill a page.
    visual_only : text stays in full precision for good. Visual tokens are packed at the end of the prompt they came with;
        ``residual`` counts those of that prompt.
    """

    site = "codec"
    budget = "none"
    default_retain = None

    page: int = 128
    residual: int = 0
    visual_only: bool = False

    def __post_init__(self) -> None:
        if self.page < 16 or self.page % 16:
            raise MmaccelError(f"{self.name} needs pages of a multiple of 16 tokens, not {self.page}.")
        if self.residual < 0:
            raise MmaccelError(f"{self.name}: residual={self.residual} is negative; give 0 or more tokens.")
        for format in self.formats(16):
            if format.axis == "channel" and (format.group % self.tile or self.page % format.group):
                raise MmaccelError(
                    f"{self.name}: groups of {format.group} tokens do not fit pages of {self.page}; a group must be a "
                    "multiple of 16 tokens and a page a whole number of groups."
                )

    @abstractmethod
    def formats(self, channels: int) -> tuple[Format, ...]:
        """Every format used for heads of this size: that of the keys first, that of the values last."""

    @property
    def tile(self) -> int:
        """Tokens of a tile: 32 where that wastes no byte and crosses no group, else 16."""
        formats = self.formats(16)
        groups = [format.group for format in formats if format.axis == "channel"]
        fits = all(self.page % (32 * format.digits) == 0 for format in formats)
        return 32 if fits and all(group % 32 == 0 for group in groups) else 16

    def packable(self, lengths: Tensor) -> Tensor:
        """How many of the oldest of ``lengths`` tokens can be packed now: whole pages, beyond the residual."""
        return (lengths - self.residual).clamp(min=0) // self.page * self.page

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor, before: Pages | None = None) -> Pages:
        """Quantise tokens and pack them.

        Parameters
        ----------
        keys, values : ``[total, D]`` and ``[total, Dv]`` float16, bfloat16 or float32, flat: head after head.
        lengths : ``[B, Hkv]`` long, tokens of each head.
        before : what these heads have packed already.
        """
        start, count, cu_pages = split(lengths.flatten(), self.page)
        cut = Cut(start, count, torch.repeat_interleave(cu_pages.diff().long()), lengths)
        return Pages(
            keys=self.key_planes(keys.contiguous(), cut, before),
            values=self.value_planes(values.contiguous(), cut),
            page=self.page,
            tile=self.tile,
            count=count,
            meta=self.meta(cut).int(),
            table=torch.arange(len(count), dtype=torch.int32, device=count.device),
            cu_pages=cu_pages,
            heads=lengths.shape[1],
        )

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        """The keys of every page, ``keys [total, D]``."""
        return (self.plane(keys, cut, self.formats(keys.shape[1])[0]),)

    def value_planes(self, values: Tensor, cut: Cut) -> tuple[Plane, ...]:
        """The values of every page, ``values [total, Dv]``."""
        return (self.plane(values, cut, self.formats(values.shape[1])[-1]),)

    def meta(self, cut: Cut) -> Tensor:
        """Which row of scales a page has; by default each has its own."""
        return torch.arange(len(cut.count), device=cut.count.device)

    def plane(self, x: Tensor, cut: Cut, format: Format) -> Plane:
        """``x [total, D]`` in one format, scales per page."""
        return quantise(x, cut.start, cut.count, format, page=self.page, tile=self.tile)


def channel_group(group: int, channels: int) -> int:
    """The group of channels that is used for heads of this size: the largest that divides both."""
    return gcd(group, channels)
