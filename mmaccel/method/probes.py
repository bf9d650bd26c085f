"""Probes: a few queries of a prompt whose attention says what all of them attend to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .layers import LayerAttention


def probing(attention: LayerAttention, most: int, count: Callable[[Tensor], Tensor]) -> LayerAttention:
    """The attention of the newest queries of every row, and of as many that are spread evenly over the others.

    Parameters
    ----------
    most : the largest number of the newest ones.
    count : how many there are in rows of ``[B, 1]`` long queries that are no padding, ``[B, 1]`` long, at least 1.
    """
    rows, keys = attention.query.shape[2], attention.key.shape[2]
    at, device = torch.arange(rows, device=attention.query.device), attention.query.device
    if attention.visible is None:
        real = torch.ones(len(attention.text), rows, dtype=torch.bool, device=device)
        visible = (torch.arange(keys, device=device) <= at[:, None] + keys - rows).expand(len(real), 1, -1, -1)
    else:
        real, visible = attention.visible[:, 0].any(-1), attention.visible
    # counted from the end, where padding is not
    length = real.sum(1, keepdim=True)
    step, newest = torch.arange(most, device=device), count(length)
    spread = newest + step * (length - newest) // newest
    chosen = rows - 1 - torch.cat([step.expand(len(real), -1), spread], 1)
    # a short prompt has fewer; a query that is spread on twice counts once
    first = torch.ones_like(chosen, dtype=torch.bool)
    first[:, most + 1 :] = spread[:, 1:] != spread[:, :-1]
    first &= (chosen >= rows - length) & (step < newest).repeat(1, 2)
    chosen = chosen.clamp(min=0)
    wide = chosen[:, None, :, None]
    return replace(
        attention,
        query=attention.query.gather(2, wide.expand(-1, attention.query.shape[1], -1, attention.query.shape[3])),
        visible=visible.gather(2, wide.expand(-1, visible.shape[1], -1, keys)) & first[:, None, :, None],
        text=attention.text.gather(1, chosen),
        prepared={},
        memo={},
    )
