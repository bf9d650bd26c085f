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
