"""Encode positions as extra embedding channels; vLLM carries them through its encoder cache in the embedding's dtype.

bfloat16 holds whole numbers up to 256 exactly, so that a position is written as base-128 digits, one channel each.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 128
#: digits of one position, which may be up to 128**3 - 1
DIGITS = 3
#: numbers of a token: a position on three axes, and one for what is behind its picture
NUMBERS = 4
CHANNELS = NUMBERS * DIGITS


def written(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode ``positions [NUMBERS, n]`` long as channels ``[n, CHANNELS]``, exact in any floating-point ``dtype`` of 16
    bits or more."""
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < BASE**DIGITS:
        raise ValueError(f"positions from 0 to {BASE**DIGITS - 1} can be written")
    scale = BASE ** torch.arange(DIGITS, device=positions.device)
    return (positions.T[..., None] // scale % BASE).flatten(1).to(dtype)


def read(channels: Tensor) -> Tensor:
    """Decode ``channels [n, CHANNELS]`` to positions ``[NUMBERS, n]`` long."""
    scale = BASE ** torch.arange(DIGITS, device=channels.device)
    return (channels.long().view(-1, NUMBERS, DIGITS) * scale).sum(-1).T
