"""Greedy determinantal selection: tokens picked one by one, each adding most to the determinant of those picked."""

from __future__ import annotations

import torch
from torch import Tensor

from ..greedy import check
from ..launch import run
from .naive import greedy_dpp_definition
from .triton import greedy_dpp_kernel


def greedy_dpp(
    x: Tensor, quality: Tensor, valid: Tensor, count: Tensor, noise: float = 0.0, most: int | None = None
) -> Tensor:
    """Greedy maximum a posteriori of a determinantal point process (Chen et al. 2018, arXiv 1709.05135; CDPruner).

    With ``L_ij = q_i (x_i . x_j) q_j``: ``argmax_j d_j``, where ``d`` starts as the diagonal of ``L`` and every pick ``i``
    subtracts ``e_j^2``, ``e_j = (L_ij - sum_k c_ki c_kj) / sqrt(d_i)``, ``c_k`` being the ``e`` of the picks before. Equal ones
    go to the lower slot. Tokens that the picked ones span already follow behind all others, by their quality. Tokens whose
    vector and quality are equal to the bit stay equal, however the device rounds products.

    All products of vectors are made once where they take no more memory than the vectors (``n <= D``); else a pick costs
    one product ``[n, D] @ [D]``. ``most x n`` numbers are stored. On a GPU a pick is one launch, and nothing is fetched from
    the device if ``most`` is given.

    Parameters
    ----------
    x : ``[N, n, D]`` float32 unit vectors, or zeros.
    quality : ``[N, n]`` float32, not negative.
    valid : ``[N, n]`` bool; nothing else is picked.
    count : ``[N]`` whole numbers, how many to pick; at most the valid ones.
    noise : a token is spanned when its ``d`` has fallen to this share of where it started.
    most : the largest ``count``, where it is known without asking the device.

    Returns
    -------
    ``[N, n]`` bool.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check("greedy_dpp", x, valid, count)
    if quality.shape != valid.shape or quality.dtype != torch.float32:
        raise ValueError(
            f"greedy_dpp takes quality [N, n] = {tuple(valid.shape)} float32, not {tuple(quality.shape)} {quality.dtype}."
        )
    if not x.numel():
        return torch.zeros_like(valid)
    return run(greedy_dpp_kernel, greedy_dpp_definition, x, quality, valid, count, noise, most)


def greedy_dpp_cost(rows: int, slots: int, width: int, turn: int) -> tuple[int, int]:
    """Bytes that pick ``turn`` has to move at least without all products, and its floating-point operations."""
    return rows * 4 * (slots * (width + turn) + 5 * slots), rows * (2 * slots * (width + turn) + 5 * slots)


__all__ = ["greedy_dpp", "greedy_dpp_cost", "greedy_dpp_definition", "greedy_dpp_kernel"]
