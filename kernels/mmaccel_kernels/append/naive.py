"""Appending in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def append_definition(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    at: Tensor,
    index: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """:func:`.append` in plain torch."""
    slots = at.long() + torch.arange(new_keys.shape[2], device=keys.device)
    keys.index_copy_(2, slots, new_keys)
    values.index_copy_(2, slots, new_values)
    if index is not None and places is not None:
        index.index_copy_(1, slots, places.to(index.dtype))
