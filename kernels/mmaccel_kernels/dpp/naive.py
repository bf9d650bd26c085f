"""Greedy determinantal selection in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..copies import first_copies, of_first, pairs_of_first
from ..greedy import by_row, has_room, largest, row_groups


def greedy_dpp_definition(
    x: Tensor, quality: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None
) -> Tensor:
    """:func:`.greedy_dpp` in plain torch."""
    if len(groups := row_groups(x)) > 1:
        found = [greedy_dpp_definition(x[g], quality[g], valid[g], count[g], noise, most) for g in groups]
        return torch.cat(found)
    first = first_tokens(x, quality)
    all_pairs = products(x, first) if has_room(x) else None
    left, least, spent = start(x, quality, valid, noise)
    picked, rows = torch.zeros_like(valid), torch.arange(len(x), device=x.device)
    turns = largest(count, most)
    basis = x.new_zeros(len(x), turns, x.shape[1])
    for i in range(turns):
        merit = torch.where(left > least, left, spent)
        pick = merit.argmax(1)
        best = merit[rows, pick][:, None]
        picked[rows, pick] |= i < count
        cosine = by_row(x, x[rows, pick]) if all_pairs is None else all_pairs[rows, pick]
        e = quality * cosine * quality[rows, pick][:, None]
        e = of_first(e - by_row(basis[:, :i].mT, basis[rows, :i, pick]), first)
        # what is spanned has a negative merit, and nothing new to subtract
        basis[:, i] = torch.where(best > 0, e / best.clamp(min=torch.finfo(torch.float32).tiny).sqrt(), 0.0)
        left = left - basis[:, i].square()
        left[rows, pick] = spent[rows, pick] = -torch.inf
    return picked


def first_tokens(x: Tensor, quality: Tensor) -> Tensor | None:
    """``[N, n]`` long: the first token with the vector and the quality of each."""
    return first_copies(torch.cat([x, quality[..., None]], 2))


def products(x: Tensor, first: Tensor | None) -> Tensor:
    """``x_i . x_j``, ``[N, n, n]``, the same for all copies."""
    return pairs_of_first(torch.bmm(x, x.transpose(1, 2)), first)


def start(x: Tensor, quality: Tensor, valid: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """``d`` before the first pick, what it has fallen to when a token is spanned, and the merit that the token then has:
    ``[N, n]`` each; nothing that is not valid has a merit above minus infinity."""
    left = quality * x.square().sum(-1) * quality
    least, spent = left * noise, -1.0 / (1.0 + quality)
    return left.masked_fill(~valid, -torch.inf), least, spent.masked_fill(~valid, -torch.inf)
