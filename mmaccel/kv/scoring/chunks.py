"""Chunks of neighbouring keys, which stay or go together."""

import torch
from torch import Tensor

from ...method import KeyBatch


def place_in_chunk(keys: KeyBatch, size: int) -> Tensor:
    """``[B, K]`` long, from 0: the place of each key in its chunk of up to ``size`` neighbours of one picture, or of text."""
    group = keys.visual.long() if keys.picture is None else keys.picture
    group = group.masked_fill(~keys.valid, -2)
    slot = torch.arange(group.shape[1], device=group.device)
    begins = torch.nn.functional.pad(group[:, 1:] != group[:, :-1], (1, 0), value=True)
    return (slot - torch.where(begins, slot, 0).cummax(1).values) % size


def to_front(x: Tensor, valid: Tensor) -> Tensor:
    """``x [B, H, K, ...]`` with what stands before the first ``valid [B, K]`` key moved to the end."""
    return _rolled(x, _before(valid))


def to_back(x: Tensor, valid: Tensor) -> Tensor:
    """The inverse of :func:`to_front`."""
    return _rolled(x, -_before(valid))


def _before(valid: Tensor) -> Tensor:
    return (valid.cumsum(1) == 0).sum(1, keepdim=True)


def _rolled(x: Tensor, shift: Tensor) -> Tensor:
    at = (torch.arange(x.shape[2], device=x.device) + shift) % x.shape[2]
    at = at.view(len(x), 1, -1, *[1] * (x.dim() - 3))
    return x.gather(2, at.expand_as(x))


def by_chunks(scores: Tensor, keys: KeyBatch, size: int) -> Tensor:
    """``scores [B, Hkv, K]`` averaged over heads and over chunks of ``size`` neighbours of one picture, or of text.

    Infinite scores stay as they are; in the means ``-inf`` counts as the lowest finite score of the row, and ``inf`` as one
    more than the highest.
    """
    chunk, lengths = keys.once(_chunks, size)
    finite = scores.isfinite()
    most = scores.masked_fill(~finite, -torch.inf).amax((1, 2), keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    least = scores.masked_fill(~finite, torch.inf).amin((1, 2), keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    means = scores.clamp(least, most + 1).mean(1)
    # adds in a fixed order, without atomics
    means = torch.segment_reduce(means.flatten(), "mean", lengths=lengths, unsafe=True)[chunk]
    return torch.where(finite, means[:, None], scores)


def _chunks(keys: KeyBatch, size: int) -> tuple[Tensor, Tensor]:
    """``[B, K]`` long, the chunk of every key, numbered over all rows; and ``[chunks]`` long, how many keys each has."""
    place = place_in_chunk(keys, size)
    chunk = ((place == 0).flatten().cumsum(0) - 1).view_as(place)
    return chunk, torch.bincount(chunk.flatten())
