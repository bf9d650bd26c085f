"""Logits in a low dimension in plain torch: the definition."""

from __future__ import annotations

from torch import Tensor


def low_rank_logits_definition(query: Tensor, basis: Tensor, keys: Tensor, join: str) -> Tensor:
    """:func:`.low_rank_logits` as two products."""
    low = query.float().unflatten(1, (keys.shape[1], -1)) @ basis.float()
    logits = low @ keys.float().mT
    return logits.amax(2) if join == "max" else logits.mean(2)
