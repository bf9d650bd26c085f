"""Layers with a recurrent state as the laws replay them: over the tokens that have been there for them, and over no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def run_over(net: nn.Module, forward: Callable[..., Tensor], hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """``forward`` of a net over the tokens that are ``net.there [B, S]``, each row closed up by itself; zero at the others."""
    out = torch.zeros_like(hidden_states)
    for row, there in enumerate(net.there):
        # autocast makes half precision of it
        out[row, there] = forward(hidden_states[row, there][None])[0].to(out.dtype)
    return out
