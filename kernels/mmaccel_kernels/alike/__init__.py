"""Whether what an earlier query chose still stands, as the query that asks now is like it."""

from __future__ import annotations

from torch import Tensor

from ..launch import run
from .naive import keep_alike_definition
from .triton import keep_alike_kernel


def keep_alike(
    query: Tensor, units: Tensor, before: Tensor, before_units: Tensor, alike: float
) -> tuple[Tensor, Tensor]:
    """Reuse the choice of an earlier step in rows whose query is like its query.

    Parameters
    ----------
    query : ``[B, Hq, D]``, floating point. units : ``[B, H, n]`` int32, what it chooses.
    before : ``[B, Hq D]`` float32, the query that chose last, of length 1. before_units : ``[B, H, n]`` int32, what it chose.
    alike : the cosine over all heads from which that stands.

    Returns
    -------
    ``before`` and ``units`` for the next step, in new tensors.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    if query.dim() != 3 or before.shape != (len(query), query[0].numel()) or units.shape != before_units.shape:
        raise ValueError(
            "keep_alike takes query [B, Hq, D], before [B, Hq D] and units [B, H, n] twice, not "
            f"{tuple(query.shape)}, {tuple(before.shape)}, {tuple(units.shape)} and {tuple(before_units.shape)}."
        )
    return run(keep_alike_kernel, keep_alike_definition, query, units, before, before_units, alike)


def keep_alike_cost(batch: int, heads: int, width: int, units: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that have to be moved at least, of ``units`` in all heads that choose, and floating-point operations."""
    return batch * (heads * width * (bytes_each + 8) + 12 * units), 5 * batch * heads * width


__all__ = ["keep_alike", "keep_alike_cost", "keep_alike_definition", "keep_alike_kernel"]
