"""What the greedy selections of tokens share: max-min (:mod:`..maxmin`) and determinantal (:mod:`..dpp`)."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """How many picks the row with most gets."""
    return int(count.max()) if most is None else most


def block_best(merit: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The best of every ``size`` of ``merit [N, n]`` and its slot, with room for the next turn's: ``[2, N, blocks]`` each."""
    padded = torch.nn.functional.pad(merit, (0, -merit.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size))
    at = padded.argmax(2, keepdim=True)
    place = at[..., 0] + torch.arange(padded.shape[1], device=at.device) * size
    return padded.gather(2, at)[..., 0].repeat(2, 1, 1), place.int().repeat(2, 1, 1)


__all__ = ["block_best", "check", "has_room", "largest"]
