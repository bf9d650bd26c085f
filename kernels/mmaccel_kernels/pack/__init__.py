"""Quantise and pack: full-precision tokens become the codes and scales of pages, in one launch over all heads.

The range of a group is what its tokens span, measured in float32 and rounded to the type the scales are stored in *before*
codes are chosen, so that codes are the best for the scales that will be used with them. A group whose numbers are all equal
has scale 0 and decodes to that number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import run
from ..pages import Format, Plane, turned
from .naive import Shared, by_book, encode, kept, measure, meta_type, quantise_definition, to_e4m3
from .triton import quantise_kernel

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantise(
    x: Tensor,
    start: Tensor,
    count: Tensor,
    format: Format,
    *,
    page: int,
    tile: int,
    meta_dtype: torch.dtype | None = None,
    shared: Shared | None = None,
) -> Plane:
    """Pages of ``x``; by the kernel on a GPU, else by the definition.

    Parameters
    ----------
    x : ``[total, D]`` float16, bfloat16 or float32; the stride along D is 1.
    start, count : ``[N]`` long and int32: page ``n`` holds rows ``start[n]`` to ``start[n] + count[n] - 1``, from 1 to
        ``page`` of them.
    meta_dtype : of the scales; by default float32 for float32, and float16 for numbers of 16 bits.
    shared : scales to use instead of measuring; they are the scales of the result.

    Raises
    ------
    ValueError
        If shapes, types or devices do not fit, or the format does not fit the page.
    """
    _check(x, start, count, format, page, tile, shared)
    meta_dtype = meta_dtype or meta_type(x.dtype)
    x = turned(x, format)
    return run(quantise_kernel, quantise_definition, x, start, count, format, page, tile, meta_dtype, shared)


def _check(
    x: Tensor, start: Tensor, count: Tensor, format: Format, page: int, tile: int, shared: Shared | None
) -> None:
    if x.dim() != 2 or x.dtype not in _DTYPES or (x.numel() and x.stride(1) != 1):
        raise ValueError(
            f"x must be [total, D] float16, bfloat16 or float32 with stride 1 along D, not {x.dtype} {tuple(x.shape)}."
        )
    format.check(page, tile, x.shape[1])
    if tile & (tile - 1):
        raise ValueError(f"tile must be a power of 2, not {tile}.")
    if start.dtype != torch.int64 or count.dtype != torch.int32 or start.dim() != 1 or start.shape != count.shape:
        raise ValueError(
            f"start and count must be [N] long and int32, not {start.dtype} {tuple(start.shape)} and {count.dtype} "
            f"{tuple(count.shape)}."
        )
    if not x.device == start.device == count.device:
        raise ValueError(f"x is on {x.device}, start on {start.device} and count on {count.device}.")
    if shared is not None:
        want = format.meta(page, x.shape[1])
        if shared.scale.shape[1:] != want or shared.meta.shape != start.shape:
            raise ValueError(
                f"shared scales must be [M, {', '.join(map(str, want))}] and meta [{len(start)}], not "
                f"{tuple(shared.scale.shape)} and {tuple(shared.meta.shape)}."
            )
        if (shared.zero is not None) != format.affine or (
            shared.zero is not None and shared.zero.shape != shared.scale.shape
        ):
            raise ValueError(
                f"Code {format.code!r} {'needs zero points like its' if format.affine else 'has only'} scales."
            )


__all__ = [
    "Shared",
    "by_book",
    "encode",
    "kept",
    "measure",
    "meta_type",
    "quantise",
    "quantise_definition",
    "quantise_kernel",
    "to_e4m3",
]
