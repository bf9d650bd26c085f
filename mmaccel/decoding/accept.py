"""Exact rules by which a model accepts drafts: what is emitted is distributed as without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """Tokens that a verified block emits.

    tokens : ``[B, n + 1]`` int64, accepted drafts and one token of the model's own; behind that -1.
    accepted : ``[B]`` int64, how many drafts are accepted, 0 to ``n``.
    """

    tokens: Tensor
    accepted: Tensor


def accept_greedy(best: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The longest path of drafted tokens that greedy decoding would have chosen: their numbers, in order; the first of several.

    Parameters
    ----------
    best : the model's most probable token after the newest committed token, and after each of the ``n`` drafted ones.
    tokens, parents : drafted tokens, a chain or a tree as in :class:`.tree.Tree`.
    """
    length = {-1: 0}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent in length and token == best[parent + 1]:
            length[node] = length[parent] + 1
    node, path = max(length, key=lambda one: length[one]), list[int]()
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def accept_branch(target: Tensor, tokens: Sequence[int], uniform: Sequence[float]) -> tuple[int | None, Tensor]:
    """Choose one of several drafted tokens for the same place, or none: its number (None if all are rejected), and the
    distribution that the next token is then drawn from.

    Each is accepted with its probability among the tokens that are left, ``u < p(x)``, and else taken out. ``target`` is the
    distribution if rounding leaves nothing.

    Parameters
    ----------
    target : ``[V]`` float32, the model's probabilities.
    tokens : different ones. uniform : one number in [0, 1) for each.
    """
    left = target
    for number, (token, u) in enumerate(zip(tokens, uniform, strict=True)):
        if u < float(left[token]):
            return number, left
        rest = left.index_fill(0, torch.tensor([token], device=left.device), 0.0)
        total = rest.sum()
        if not float(total):
            return None, target
        left = rest / total
    return None, left


def accept_sampled(
    target: Tensor, drafts: Tensor, uniform: Tensor, exponential: Tensor, draft_probabilities: Tensor | None = None
) -> Accepted:
    """Accept drafts by rejection sampling: every emitted token is distributed as ``target`` says, given those before.

    A draft ``d`` of probability ``q(d)`` is accepted if ``u < p(d) / q(d)``. In place of the first that is not, one token is
    drawn from ``max(p - q, 0)``; if all are accepted, one from ``p`` after the last. Where rounding leaves nothing of
    ``max(p - q, 0)``, ``p`` is drawn from.

    Parameters
    ----------
    target : ``[B, n + 1, V]`` float32, the model's probabilities after the newest committed token and after each draft, with
        temperature, top-k, top-p and penalties applied.
    drafts : ``[B, n]`` int64, padded with -1, which is never accepted.
    uniform : ``[B, n]`` float64 in [0, 1), see :func:`random_numbers`.
    exponential : ``[B, V]`` float32, exponentially distributed: the token drawn is that with the largest ``p / e``.
    draft_probabilities : ``[B, n, V]`` float32, the distributions that the drafts were drawn from. None if they were not
        drawn but chosen, so that ``q(d)`` is 1.
    """
    real = drafts >= 0
    index = drafts.clamp(min=0)[..., None]
    p = target[:, :-1].gather(2, index)[..., 0].double()
    q = None if draft_probabilities is None else draft_probabilities.gather(2, index)[..., 0].double()
    accepted = real & (uniform.double() * (1.0 if q is None else q) < p)
    if q is not None:
        accepted &= q > 0
    count = _prefix(accepted)
    rows = torch.arange(len(drafts), device=drafts.device)
    own = target[rows, count]
    if drafts.shape[1]:
        # behind the last draft nothing is rejected
        place = count.clamp(max=drafts.shape[1] - 1)
        rejected = (count < drafts.shape[1]) & real[rows, place]
        if draft_probabilities is None:
            left = own.scatter(1, index[rows, place], 0.0)
        else:
            left = (own - draft_probabilities[rows, place]).clamp(min=0)
        rejected &= left.sum(1) > 0
        own = torch.where(rejected[:, None], left, own)
    return _emitted(drafts, accepted, (own / exponential).argmax(1)[:, None].expand(-1, drafts.shape[1] + 1))


def random_numbers(drafts: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random numbers of one block of ``drafts [B, n]`` for :func:`accept_sampled`: ``uniform [B, n]`` float64, because float32
    draws 0 too often, and ``exponential [B, V]``; from torch's global generator, as ``generate`` draws."""
    uniform = torch.rand(drafts.shape, dtype=torch.float64, device=drafts.device)
    return uniform, torch.empty(len(drafts), vocabulary, device=drafts.device).exponential_()


def _prefix(accepted: Tensor) -> Tensor:
    """How many of ``[B, n]`` bool are true before the first that is not."""
    return accepted.long().cumprod(1).sum(1)


def _emitted(drafts: Tensor, accepted: Tensor, own: Tensor) -> Accepted:
    """Accepted drafts and the model's own token after them, of ``own [B, n + 1]``."""
    count = _prefix(accepted)
    place = torch.arange(own.shape[1], device=own.device)
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    tokens = torch.where(place < count[:, None], padded, torch.where(place == count[:, None], own, -1))
    return Accepted(tokens, count)
