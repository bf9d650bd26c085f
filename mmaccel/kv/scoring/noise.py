"""Noise that is a function of places, so that it is the same every time and in every batch."""

import torch
from torch import Tensor

#: odd numbers without a pattern (of the generator splitmix64), as signed
_STEP, _MIX, _END = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def gumbel(places: Tensor, heads: int, keys: int) -> Tensor:
    """``[B, heads, q, keys]`` float32 with a standard Gumbel distribution.

    places : ``[B, q]`` long, of the queries.
    """
    head, key = (torch.arange(n, device=places.device) for n in (heads, keys))
    code = (places[:, None, :, None] * 1_000_003 + head[:, None, None]) * 1_000_003 + key
    code = (code + 1) * _STEP
    code = (code ^ ((code >> 30) & 0x3FFFFFFFF)) * _MIX
    code = (code ^ ((code >> 27) & 0x1FFFFFFFFF)) * _END
    uniform = ((code >> 40) & 0xFFFFFF).float().add(0.5) / (1 << 24)
    return -(-uniform.log()).log()
