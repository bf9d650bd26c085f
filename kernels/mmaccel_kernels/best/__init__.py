"""The units of keys with the highest ratings, as a list that stays on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import run
from .naive import best_units_definition
from .triton import best_units_kernel


def best_units(
    ratings: Tensor,
    count: Tensor,
    most: int,
    *,
    each: int = 1,
    gone: Tensor | None = None,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The numbers of the best units of every head, of equal ones the first, in rising order; one launch, nobody waits.

    Parameters
    ----------
    ratings : ``[B, H, P each]`` floating point, none of them NaN; ``-0.0`` is ``0.0``. A unit is as good as the best of the
        ``each`` consecutive parts that are rated.
    count : ``[B, 1 or H]`` int32, how many are listed, at most ``most`` and as many as there are.
    gone : ``[B, 1 or H, P each]`` bool, parts that are not there, whatever their ratings; a unit without any is not listed.
        None if all are there.
    least : ``[B]`` float32; what is rated lower is left out. None for no such bar.

    Returns
    -------
    ``[B, H, most]`` int32, ``P`` for none behind the last one; and how many there are, ``[B, H]`` int32.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    shape = (len(ratings), ratings.shape[1]) if ratings.dim() == 3 else None
    if shape is None or not ratings.is_floating_point():
        raise ValueError(
            f"best_units takes ratings [B, H, P] floating point, not {tuple(ratings.shape)} {ratings.dtype}."
        )
    if count.shape not in (shape, (shape[0], 1)) or count.dtype != torch.int32:
        raise ValueError(f"count must be [{shape[0]}, 1 or {shape[1]}] int32, not {tuple(count.shape)} {count.dtype}.")
    if gone is not None and (
        gone.shape not in (ratings.shape, (shape[0], 1, ratings.shape[2])) or gone.dtype != torch.bool
    ):
        raise ValueError(
            f"gone must be bool [{shape[0]}, 1 or {shape[1]}, {ratings.shape[2]}], not {tuple(gone.shape)} {gone.dtype}."
        )
    if least is not None and (least.shape != (shape[0],) or least.dtype != torch.float32):
        raise ValueError(f"least must be [{shape[0]}] float32, not {tuple(least.shape)} {least.dtype}.")
    if ratings.shape[2] % each:
        raise ValueError(f"ratings has {ratings.shape[2]} parts, which are not whole units of {each}.")
    if not ratings.numel() or not most:
        return best_units_definition(ratings, count, most, each, gone, least)
    return run(best_units_kernel, best_units_definition, ratings, count, most, each, gone, least)


def best_units_cost(batch: int, heads: int, units: int, most: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that have to be moved at least, ratings of ``bytes_each``, and floating-point operations: comparisons are none."""
    return batch * heads * (bytes_each * units + 4 * most + 8), 0


__all__ = ["best_units", "best_units_cost", "best_units_definition", "best_units_kernel"]
