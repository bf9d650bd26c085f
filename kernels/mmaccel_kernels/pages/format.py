"""Formats of codes, described in :mod:`mmaccel_kernels.pages`, as a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .._triton import triton

Code = Literal[
    "sign", "ternary", "three", "int1", "int2", "int3", "int4", "int8", "fp8", "book1", "book2", "book3", "book4"
]

#: code -> (levels, codes a byte, what a code without zero point is centred on)
_CODES: dict[str, tuple[int, int, float]] = {
    "sign": (2, 8, 0.5),
    "ternary": (3, 5, 1.0),
    "three": (3, 4, 1.0),
    "int1": (2, 8, 0.0),
    "int2": (4, 4, 0.0),
    "int3": (8, 8, 0.0),
    "int4": (16, 2, 0.0),
    "int8": (256, 1, 0.0),
    "fp8": (253, 1, 0.0),
    "book1": (2, 8, 0.0),
    "book2": (4, 4, 0.0),
    "book3": (8, 8, 0.0),
    "book4": (16, 2, 0.0),
}

_EIGHT_COLUMNS = triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)

#: the largest number of e4m3
FP8_MAX = 448.0


@dataclass(frozen=True)
class Format:
    """A format of codes.

    Parameters
    ----------
    code : see the table above.
    axis : ``channel`` (one scale for every channel of a group of tokens) or ``token`` (one for every token of a group of
        channels).
    group : tokens, or channels, that share a scale.
    fourier : code the :func:`waves` of the channels.
    seed : code the channels after the rotation of this seed (:func:`.rotation.rotate`); None for no rotation.
    sketch : the map of ``seed`` is no rotation, but a matrix of independent normal numbers.
    book : of a ``book`` code the positive levels, ascending, for numbers of variance 1.
    corrected : a scale makes what is represented as long as the token; else it is the root mean square of the token.
    """

    code: Code
    axis: Literal["channel", "token"]
    group: int
    fourier: bool = False
    seed: int | None = None
    sketch: bool = False
    book: tuple[float, ...] = ()
    corrected: bool = True

    def __post_init__(self) -> None:
        if self.code not in _CODES:
            raise ValueError(f"There is no code {self.code!r}; there are {', '.join(_CODES)}.")
        if self.axis not in ("channel", "token"):
            raise ValueError(f"axis must be 'channel' or 'token', not {self.axis!r}.")
        if self.group < 1:
            raise ValueError(f"group must be at least 1, not {self.group}.")
        if len(self.book) != (self.levels // 2 if self.by_book else 0):
            raise ValueError(f"Code {self.code!r} has {len(self.book)} positive levels.")
        if self.by_book and self.axis != "token":
            raise ValueError(f"Code {self.code!r} needs axis='token'.")

    @property
    def by_book(self) -> bool:
        """Whether levels stand in ``book``: the lower bits of a code say which, and its highest bit that it is negative."""
        return self.code.startswith("book")

    @property
    def three_bits(self) -> bool:
        """Whether codes have three bits: the lower two of all tokens come first, then the highest."""
        return self.levels == 8

    @property
    def turned(self) -> bool:
        """Whether it is not the channels themselves that are coded."""
        return self.fourier or self.seed is not None

    @property
    def levels(self) -> int:
        """Different codes."""
        return _CODES[self.code][0]

    @property
    def digits(self) -> int:
        """Codes a byte."""
        return _CODES[self.code][1]

    @property
    def centre(self) -> float:
        """The code of zero, where there is no zero point."""
        return _CODES[self.code][2]

    @property
    def affine(self) -> bool:
        """Whether a zero point is stored."""
        return self.code.startswith("int")

    def interleaved(self, width: int) -> bool:
        """Whether the codes of a token's ``width`` channels stand as ``[8, groups, group / 8]`` instead of in order."""
        return self.axis == "token" and self.group < width and self.group % 32 == 0

    def rows(self, page: int, tile: int) -> int:
        """Rows of bytes of a page."""
        if self.three_bits:
            return self.rows_of_two(page, tile) + tile * -(-page // (tile * 8))
        return tile * -(-page // (tile * self.digits))

    def rows_of_two(self, page: int, tile: int) -> int:
        """Rows of bytes of a page with the lower two bits of codes of three."""
        return tile * -(-page // (tile * 4))

    def meta(self, page: int, width: int) -> tuple[int, int]:
        """Shape of the scales of a page of ``width`` channels."""
        return (page // self.group, width) if self.axis == "channel" else (page, width // self.group)

    def check(self, page: int, tile: int, width: int) -> None:
        """Refuse a page that this format does not fit.

        Raises
        ------
        ValueError
            If the page is no whole number of tiles, a tile crosses a group, or groups do not fill page or channels.
        """
        if tile < 1 or page < 1 or page % tile:
            raise ValueError(f"A page of {page} tokens is no whole number of tiles of {tile}.")
        if self.axis == "channel" and (page % self.group or self.group % tile):
            raise ValueError(
                f"Groups of {self.group} tokens do not fit pages of {page} in tiles of {tile}: a page must be a whole "
                "number of groups and a group a whole number of tiles."
            )
        if self.axis == "token" and width % self.group:
            raise ValueError(f"{width} channels are no whole number of groups of {self.group}.")


def paged() -> bool:
    """Whether there is a fast kernel for pages here: on NVIDIA, and by a Triton with products of eight columns, from 3.6 on."""
    return _EIGHT_COLUMNS and torch.version.hip is None


def tile_for(formats: tuple[Format, ...], page: int, width: int, otherwise: int) -> int:
    """The largest tile with which a quarter of a page has bytes and groups of its own, for heads of ``width`` channels, so that
    the fast kernel can read it; ``otherwise`` if there is none."""
    if any(form.by_book or form.three_bits for form in formats):
        # read by the loop in CUDA C++, or by the kernel for tiles of 16
        return 16
    share = page // 4
    whole = all(form.axis == "token" or form.group % share == 0 for form in formats)
    plain = len(formats) <= 2 and all(form.code != "ternary" for form in formats)
    if (
        torch.version.hip is None
        and plain
        and whole
        and page % 64 == 0
        and share & (share - 1) == 0
        and width in (32, 64, 128, 256)
    ):
        for tile in (32, 16, 8):
            if share % (tile * max(form.digits for form in formats)) == 0:
                return tile
    return otherwise
