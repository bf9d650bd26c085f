"""Heads that store different counts: where each begins, and their cut into pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cumulative(lengths: Tensor) -> Tensor:
    """``[n]`` -> ``[n + 1]`` int32: where each begins, and the sum."""
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0)).int()


def ranges(start: Tensor, length: Tensor) -> Tensor:
    """``start[i], start[i] + 1, ...``, ``length[i]`` of them, one after the other; ``[sum(length)]`` long."""
    begin = length.cumsum(0) - length
    offset = torch.repeat_interleave(start - begin, length)
    return torch.arange(len(offset), device=start.device) + offset


def sums(values: Tensor, bounds: Tensor) -> Tensor:
    """Sums of ``values`` between consecutive ``bounds``, ``[len(bounds) - 1]``."""
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))[bounds.long()].diff()


def split(lengths: Tensor, page: int, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Flat ragged heads cut into pages.

    Parameters
    ----------
    lengths : ``[B Hkv]`` long, tokens of each head, which stand one head after the other in a flat ``[total, D]``.
    total : how many pages that makes, where it is known without asking the device.

    Returns
    -------
    first row and count of every page, ``[N]`` long and int32, head after head; ``cu_pages [B Hkv + 1]`` int32.
    """
    lengths = lengths.long()
    pages = -(-lengths // page)
    cu_pages = cumulative(pages)
    head = torch.repeat_interleave(pages, output_size=total)
    offset = (torch.arange(len(head), device=head.device) - cu_pages.long()[head]) * page
    start = (lengths.cumsum(0) - lengths)[head] + offset
    return start, (lengths[head] - offset).clamp(max=page).int(), cu_pages


def concatenated(parts: Sequence[Tensor], lengths: Sequence[Tensor]) -> Tensor:
    """Flat ragged parts ``[total_i, D]`` with ``lengths_i [heads]`` -> flat, the parts of each head one after the other."""
    owner = torch.cat([torch.repeat_interleave(n.flatten()) for n in lengths])
    return torch.cat(list(parts))[owner.argsort(stable=True)]
