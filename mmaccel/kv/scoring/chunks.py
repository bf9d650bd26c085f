"""Chunks of neighbouring keys, which stay or go together."""

from __future__ import annotations

import torch
from torch import Tensor

from ...method import KeyBatch


def place_in_chunk(keys: KeyBatch, size: int) -> Tensor:
    """``[B, K]`` long, from 0: where each key stands in its chunk of up to ``size`` neighbours of one kind."""
    kind = keys.visual.long() if keys.picture is None else keys.picture
    kind = kind.masked_fill(~keys.valid, -2)
    slot = torch.arange(kind.shape[1], device=kind.device)
    begins = torch.nn.functional.pad(kind[:, 1:] != kind[:, :-1], (1, 0), value=True)
    return (slot - torch.where(begins, slot, 0).cummax(1).values) % size


def by_chunks(scores: Tensor, keys: KeyBatch, size: int) -> Tensor:
    """Scores ``[B, Hkv, K]`` replaced by the mean over heads and over chunks of ``size`` neighbours of one kind. Infinite ones
    stay, and count as the least of their row, or as one more than the largest."""
    chunk, lengths = keys.once(_chunks, size)
    finite = scores.isfinite()
    most = scores.masked_fill(~finite, -torch.inf).amax((1, 2), keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    least = scores.masked_fill(~finite, torch.inf).amin((1, 2), keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    means = scores.clamp(least, most + 1).mean(1)
    # sums in a fixed order, without atomics
    means = torch.segment_reduce(means.flatten(), "mean", lengths=lengths, unsafe=True)[chunk]
    return torch.where(finite, means[:, None], scores)


def _chunks(keys: KeyBatch, size: int) -> tuple[Tensor, Tensor]:
    """``[B, K]`` long: the chunk of every key, counted over all rows; and how many keys each chunk has."""
    place = place_in_chunk(keys, size)
    chunk = ((place == 0).flatten().cumsum(0) - 1).view_as(place)
    return chunk, torch.bincount(chunk.flatten())
