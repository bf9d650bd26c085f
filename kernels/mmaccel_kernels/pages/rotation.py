"""Seeded rotations of the channels of a head.

Where the number of channels is a power of two, it is a Hadamard transform of channels with random signs, on a CPU in ``log2 D``
steps of sums and differences; else the orthogonal factor of a matrix of normal numbers. Matrices are multiplied in double
precision: the result of a token does not depend on the tokens beside it, and on a GPU a step launches one product.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rotate(x: Tensor, seed: int, sketch: bool = False) -> Tensor:
    """``R x`` of the last axis of ``x [..., D]`` float32, the same shape. ``R`` is orthogonal, or for a ``sketch`` a matrix of
    independent numbers of N(0, 1)."""
    if _by_steps(x, sketch):
        return _hadamard(x * signs(x.shape[-1], seed))
    return (x.double() @ _matrix_for(x, seed, sketch).mT).float()


def rotate_back(x: Tensor, seed: int, sketch: bool = False) -> Tensor:
    """``R^T x``, the inverse of :func:`rotate` unless it is of a ``sketch``."""
    if _by_steps(x, sketch):
        return _hadamard(x) * signs(x.shape[-1], seed)
    return (x.double() @ _matrix_for(x, seed, sketch)).float()


def matrix(width: int, seed: int, sketch: bool = False) -> Tensor:
    """``R [D, D]`` float64, on the CPU."""
    if not sketch and _fast(width):
        eye = torch.eye(width, dtype=torch.float64)
        return _hadamard(eye) * signs(width, seed).double()
    return _matrix(width, seed, sketch)


@lru_cache(maxsize=64)
def signs(width: int, seed: int) -> Tensor:
    """Signs of channels before the Hadamard transform, ``[D]`` float32; all are 1 for seed 0."""
    with torch.inference_mode(False):
        if seed == 0:
            return torch.ones(width)
        rng = torch.Generator().manual_seed(seed)
        return 1 - 2.0 * torch.randint(2, (width,), generator=rng)


@lru_cache(maxsize=64)
def _matrix(width: int, seed: int, sketch: bool) -> Tensor:
    with torch.inference_mode(False):
        rng = torch.Generator().manual_seed(seed)
        normal = torch.randn(width, width, generator=rng, dtype=torch.float64)
        if sketch:
            return normal
        q, r = torch.linalg.qr(normal)
        # which of all orthogonal factors it is does not depend on the library
        return q * r.diagonal().sign()


def _fast(width: int) -> bool:
    return width & (width - 1) == 0


def _by_steps(x: Tensor, sketch: bool) -> bool:
    return not sketch and _fast(x.shape[-1]) and x.device.type == "cpu"


def _matrix_for(x: Tensor, seed: int, sketch: bool) -> Tensor:
    width = x.shape[-1]
    return matrix(width, seed, sketch) if x.device.type == "cpu" else matrices_on(x.device, width, seed, sketch)[0]


@lru_cache(maxsize=64)
def matrices_on(device: torch.device, width: int, seed: int, sketch: bool) -> tuple[Tensor, Tensor]:
    """:func:`matrix` on a device, in float64 and in float32. Both stay there: a step that is captured may copy nothing from the
    host."""
    with torch.inference_mode(False):
        exact = matrix(width, seed, sketch).to(device)
        return exact, exact.float().contiguous()


@lru_cache(maxsize=64)
def block_diagonal_on(device: torch.device, parts: tuple[tuple[int, int], ...]) -> Tensor:
    """The rotation of channels that are rotated in parts, of so many channels and by such a seed each, ``[D, D]`` float32 on a
    device."""
    with torch.inference_mode(False):
        return torch.block_diag(*(matrices_on(device, width, seed, False)[1] for width, seed in parts))


def _hadamard(x: Tensor) -> Tensor:
    """Sylvester's Hadamard matrix of order ``D`` over ``sqrt(D)``, times ``x [..., D]``."""
    width, step = x.shape[-1], 1
    while step < width:
        first, second = x.unflatten(-1, (width // (2 * step), 2, step)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return x * width**-0.5
