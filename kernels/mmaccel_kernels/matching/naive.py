"""Bipartite matching in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

#: products held at once; they fit a core's cache
BLOCK = 1 << 20


def best_match_definition(x: Tensor, y: Tensor, there: Tensor | None, others: bool) -> tuple[Tensor, Tensor]:
    """:func:`.best_match` in plain torch, in blocks of rows."""
    rows, a, b = len(x), x.shape[1], y.shape[1]
    score = torch.full((rows, a), -torch.inf, device=x.device)
    place = torch.zeros(rows, a, dtype=torch.long, device=x.device)
    against, number = y.float().transpose(1, 2), torch.arange(b, device=x.device)
    height = max(1, BLOCK // max(1, rows * b))
    for top in range(0, a if b else 0, height):
        product = torch.bmm(x[:, top : top + height].float(), against)
        if there is not None:
            product = product.masked_fill_(~there[:, None], -torch.inf)
        if others:
            own = torch.arange(top, top + product.shape[1], device=x.device)[:, None] == number
            product = product.masked_fill_(own, -torch.inf)
        # argmax takes the first of equals, max leaves open which
        at = product.argmax(2, keepdim=True)
        place[:, top : top + height] = at[..., 0]
        score[:, top : top + height] = product.gather(2, at)[..., 0]
    return score, place
