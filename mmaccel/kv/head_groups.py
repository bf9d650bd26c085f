"""Layers in host memory that are read some heads at a time (HeadInfer, arXiv:2502.12574).

Of a layer with very many keys the device holds the heads that attend and those that are copied beside them, in place of two or
three whole layers. New keys are written to host memory. The attention of every head is that over the whole layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .host import HostStore, Movable, buffer_of, on_stream, wait_for
from .index import KeyIndex
from .packed_keys import PackedKeys
from .ragged import Ragged
from .shared_prefix import SharedPrefix

#: bytes of keys and values of heads that are fetched together: a layer with fewer is fetched whole. With 8 heads of 128
#: channels in 16 bits, 131,072 tokens
GROUP = 512 << 20


class Parked(Movable, Protocol):
    """Protocol of a layer, see :class:`.layer.CompressedLayer`."""

    values: Tensor
    ragged: Ragged | None
    prefix: SharedPrefix | None
    packed: PackedKeys
    latent: bool

    @property
    def index(self) -> KeyIndex:
        """Index of the stored keys."""


def heads_at_once(layer: Parked) -> int | None:
    """Number of heads of a layer that are fetched together; None where it is fetched whole, or is not in host memory."""
    if not layer.is_initialized or (total := layer.keys.nbytes + layer.values.nbytes) <= GROUP:
        return None
    if layer.latent or layer.packed.any_pages or layer.index.of_heads or buffer_of(layer.keys) is None:
        return None
    if layer.ragged is not None or layer.prefix is not None:
        return None
    heads = layer.keys.shape[1]
    return max(1, heads * GROUP // total)


@dataclass
class _Group:
    """Copies of the first ``length`` keys and values of heads, ``[B, n, room, D]``, and the event behind which they are
    complete."""

    heads: slice
    length: int
    copies: list[Tensor]
    event: Any


class HeadStore(HostStore):
    """The copies of one cache between its device and the host, with layers that are copied some heads at a time."""

    def __init__(self) -> None:
        super().__init__()
        #: the first heads of the layer that attends next
        self._first: dict[int, _Group] = {}

    @torch.no_grad()
    def begin_heads(self, layer: Parked, heads: int) -> int:
        """Start to copy the first heads of a layer, beside the work on its device; returns how many bytes."""
        before = self.moved.fetched
        self._first = {layer.number: self._copied(layer, slice(0, heads))}
        return self.moved.fetched - before

    @torch.no_grad()
    def by_heads(self, layer: Parked, heads: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Keys and values ``[B, n, K, D]`` on the device of so many heads at a time, each copied while those before it attend.
        The caller lets go of them before it asks for the next ones, so that no more than two groups are there."""
        parts = [slice(at, at + heads) for at in range(0, layer.keys.shape[1], heads)]
        coming, total = self._first.pop(layer.number, None), layer.keys.shape[2]
        if coming is None or coming.heads != parts[0] or coming.copies[0].shape[2] < total:
            # none was begun, or the layer has been given more room
            coming = self._copied(layer, parts[0])
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            length, copies = coming.length, coming.copies
            wait_for(coming.event, layer.keys.device)
            coming = coming if following is None else self._copied(layer, following)
            for copy, parked in zip(copies, (layer.keys, layer.values), strict=True):
                # what was stored after the copy had begun
                copy[:, :, length:total].copy_(parked[:, part, length:])
            keys, values = (copy[:, :, :total] for copy in copies)
            del copies
            yield part, keys, values
            del keys, values

    def end_forward(self) -> None:
        """A forward is over, or was broken off: nothing is on its way any more."""
        for group in self._first.values():
            wait_for(group.event, group.copies[0].device)
        self._first = {}
        super().end_forward()

    def _copied(self, layer: Parked, heads: slice) -> _Group:
        length, copies = layer.keys.shape[2], []
        stream = self.beside(layer.keys.device)
        for x in (layer.keys, layer.values):
            buffer = buffer_of(x)
            assert buffer is not None
            shown = buffer[:, heads]
            # memory of the stream that reads it, whichever writes it
            copies.append(copy := torch.empty(shown.shape, dtype=x.dtype, device=x.device))
            with on_stream(stream):
                # a copy that nobody waits for has to be contiguous
                for to, of in (
                    (to, of) for pair in zip(copy, shown, strict=True) for to, of in zip(*pair, strict=True)
                ):
                    to[:length].copy_(of[:length], non_blocking=True)
            self.moved.fetched += copy[:, :, :length].nbytes
        return _Group(heads, length, copies, stream and stream.record_event())
