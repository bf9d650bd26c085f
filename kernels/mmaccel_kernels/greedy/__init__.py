"""Parts that the greedy selections of tokens share: max-min (:mod:`..maxmin`) and determinantal (:mod:`..dpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

#: entries of vectors that are picked from together on a CPU
CACHED = 1 << 20


def check(name: str, x: Tensor, valid: Tensor, count: Tensor) -> None:
    """Refuse wrong shapes and types by name."""
    if x.dim() != 3 or x.dtype != torch.float32:
        raise ValueError(f"{name} takes x [N, n, D] float32, not {tuple(x.shape)} {x.dtype}.")
    if valid.shape != x.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(
            f"{name} takes valid [N, n] = {tuple(x.shape[:2])} bool, not {tuple(valid.shape)} {valid.dtype}."
        )
    if count.shape != x.shape[:1] or count.is_floating_point():
        raise ValueError(
            f"{name} takes count [N] = {tuple(x.shape[:1])} whole numbers, not {tuple(count.shape)} {count.dtype}."
        )


def has_room(x: Tensor) -> bool:
    """Whether all products of ``x [N, n, D]`` take no more memory than ``x``; the answer is the same for every batch."""
    return x.shape[1] <= x.shape[2]


def largest(count: Tensor, most: int | None) -> int:
    """Number of picks of the row with most."""
    return int(count.max()) if most is None else most


def block_best(merit: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The best of every ``size`` of ``merit [N, n]`` and its slot, with room for the next turn's: ``[2, N, blocks]`` each."""
    padded = torch.nn.functional.pad(merit, (0, -merit.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size))
    at = padded.argmax(2, keepdim=True)
    place = at[..., 0] + torch.arange(padded.shape[1], device=at.device) * size
    return padded.gather(2, at)[..., 0].repeat(2, 1, 1), place.int().repeat(2, 1, 1)


def by_row(matrix: Tensor, vector: Tensor) -> Tensor:
    """``[N, n]``: every ``matrix [N, n, D]`` times its ``vector [N, D]``.

    A CPU takes one row after the other: its batched product of a matrix and a vector takes up to five times as long.
    """
    if matrix.device.type != "cpu":
        return torch.bmm(matrix, vector[..., None])[..., 0]
    return torch.stack([torch.mv(*pair) for pair in zip(matrix, vector, strict=True)])


def row_groups(x: Tensor) -> list[slice]:
    """The rows of ``x [N, n, D]`` in groups whose vectors, or the products of whose vectors, a CPU keeps in its cache from pick
    to pick; one group elsewhere, and where there are fewer products than channels."""
    size = len(x) if x.device.type != "cpu" or has_room(x) else max(1, CACHED // x.shape[1] ** 2)
    return [slice(start, start + size) for start in range(0, len(x), size)]


__all__ = ["block_best", "by_row", "check", "has_room", "largest", "row_groups"]
