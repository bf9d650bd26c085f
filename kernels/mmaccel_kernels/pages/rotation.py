"""Seeded rotations of the channels of a head.

Where the number of channels is a power of two, it is a Hadamard transform of channels with random signs, in ``log2 D`` steps of
sums and differences; else the orthogonal factor of a matrix of normal numbers, multiplied in double precision. So the result
of a token does not depend on the tokens beside it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rotate(x: Tensor, seed: int, sketch: bool = False) -> Tensor:
    """``R x`` of the last axis of ``x [..., D]`` float32, the same shape. ``R`` is orthogonal, or for a ``sketch`` a matrix of
    independent numbers of N(0, 1)."""
    if sketch or not _fast(x.shape[-1]):
        return (x.double() @ _matrix_on(x, seed, sketch).mT).float()
    return _hadamard(x * _on(x, signs(x.shape[-1], seed)))


def rotate_back(x: Tensor, seed: int, sketch: bool = False) -> Tensor:
    """``R^T x``, the inverse of :func:`rotate` unless it is of a ``sketch``."""
    if sketch or not _fast(x.shape[-1]):
        return (x.double() @ _matrix_on(x, seed, sketch)).float()
    return _hadamard(x) * _on(x, signs(x.shape[-1], seed))


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


def _on(x: Tensor, held: Tensor) -> Tensor:
    return held if x.device.type == "cpu" else held.to(x.device, non_blocking=True)


def _matrix_on(x: Tensor, seed: int, sketch: bool) -> Tensor:
    return _on(x, _matrix(x.shape[-1], seed, sketch))


def _hadamard(x: Tensor) -> Tensor:
    """Sylvester's Hadamard matrix of order ``D`` over ``sqrt(D)``, times ``x [..., D]``."""
    width, step = x.shape[-1], 1
    while step < width:
        first, second = x.unflatten(-1, (width // (2 * step), 2, step)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return x * width**-0.5
