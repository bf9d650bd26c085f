"""Layers with a recurrent state as the laws replay them: over the tokens that have been there for them, and over no others; and
layers with an indexer: it chooses among the tokens that are to be seen."""

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


def stub(config: Any) -> Tensor | None:
    """The mask of a text model whose attention is replayed: one of four axes where an indexer wants one."""
    kinds = getattr(config, "layer_types", None) or ()
    return torch.ones(1, 1, 1, 1, dtype=torch.bool) if "indexed_attention" in kinds else None


def show(visible: Callable[[], Tensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook before an indexer, which chooses among the keys that are ``visible [B, H, S, S]``, the same for all heads."""
    return tuple(visible()[:, 0] if isinstance(x, Tensor) and x.dtype == torch.bool else x for x in args), kwargs


def chosen_of(visible: Tensor, indices: Tensor | None) -> Tensor:
    """Those of the ``visible [B, H, q, K]`` keys that an indexer has chosen, if there is one."""
    if indices is None:
        return visible
    return visible & torch.zeros_like(visible[:, 0]).scatter(2, indices.long(), True)[:, None]
