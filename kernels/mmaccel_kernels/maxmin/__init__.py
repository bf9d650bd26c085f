"""Max-min selection: tokens picked one by one, each farthest by cosine from those picked before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..greedy import check
from ..launch import run
from .naive import max_min_definition
from .triton import max_min_kernel


def max_min(
    x: Tensor,
    valid: Tensor,
    count: Tensor,
    noise: float = 0.0,
    most: int | None = None,
    limit: Tensor | None = None,
) -> Tensor:
    """Greedy max-min selection (Gonzalez 1985; DivPrune, arXiv 2503.02175).

    With ``d(i, j) = 1 - x_i . x_j`` the first pick is ``argmax_i min_{j != i} d(i, j)``, each next one
    ``argmax_i min_{j picked} d(i, j)``. With a ``limit`` no measure is larger than that of its token, and the first pick is the
    token with the largest, of several without one as above. Equal distances go to the lower slot. Vectors that are equal to
    the bit are at a distance of zero, and have the same distances to all others, however the device rounds products.

    All distances are made once where they take no more memory than the vectors (``n <= D``), on a CPU of up to 4,096
    tokens, and on a GPU of up to 8,192, of which one launch then picks all; else a pick costs one product ``[n, D] @ [D]``. On
    a GPU nothing is fetched from the device if ``most`` is given or all distances are made, so the selection can be part of a
    captured graph.

    Parameters
    ----------
    x : ``[N, n, D]`` float32 unit vectors.
    valid : ``[N, n]`` bool; nothing else is picked.
    count : ``[N]`` whole numbers, how many to pick; at most the valid ones.
    noise : distances below it count as zero.
    most : the largest ``count``, where it is known without asking the device.
    limit : ``[N, n]`` float32, zero or more; infinity for a token without one, as all are by default.

    Returns
    -------
    ``[N, n]`` float32: the measure by which each token was picked, infinity for a first one without a limit, minus infinity
    for what was not picked. A later pick never has a larger one.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check("max_min", x, valid, count)
    limit = x.new_full(valid.shape, torch.inf) if limit is None else limit
    if limit.shape != valid.shape or limit.dtype != torch.float32:
        raise ValueError(
            f"max_min takes limit [N, n] = {tuple(valid.shape)} float32, not {tuple(limit.shape)} {limit.dtype}."
        )
    if not x.numel():
        return torch.full_like(limit, -torch.inf)
    return run(max_min_kernel, max_min_definition, x, valid, count, noise, most, limit)


def max_min_cost(rows: int, slots: int, width: int) -> tuple[int, int]:
    """Bytes that one pick has to move at least without all distances, and its floating-point operations."""
    return rows * 4 * (slots * width + 2 * slots), rows * (2 * slots * width + 2 * slots)


__all__ = ["max_min", "max_min_cost", "max_min_definition", "max_min_kernel"]
