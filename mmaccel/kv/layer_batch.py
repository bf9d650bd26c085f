"""Layers of one cache as the rows of one batch, so that what is done with their keys is done once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import pad

from .codecs import TokenGroup
from .index import KeyIndex, on_host
from .layer import KeptKeys
from .merged_keys import MergedKeys
from .packed import QuantisedLayer, demote


def batches(
    layers: Sequence[QuantisedLayer], kind: Callable[[QuantisedLayer], Hashable], most: int
) -> Iterator[LayerBatch]:
    """Layers that can be rows of one batch, as many at a time as have at most so many bytes of keys and values, or one.

    kind : what else must be the same in the layers of a batch.
    """
    kinds: dict[Hashable, list[QuantisedLayer]] = {}
    for layer in layers:
        # keys of an indexer are stored, and no part of what a batch reads
        keys, alone = layer.keys, not layer.packed.untouched or layer.indexer > 0
        shape = keys.device, keys.dtype, keys.shape[:2], keys.shape[3], layer.values.shape[3], layer.index.index.dim()
        carried = layer.schedule.received is None, layer.schedule.threshold is None
        kinds.setdefault((layer.number if alone else None, shape, carried, kind(layer)), []).append(layer)
    for alike in kinds.values():
        step = max(1, most // max(1, max(map(size, alike))))
        yield from (LayerBatch(alike[start : start + step]) for start in range(0, len(alike), step))


#: a part of some work, which yields tensors and is sent the same on the CPU
Asking = Generator[Sequence[Tensor], Sequence[Tensor], None]


class InStep:
    """Parts of some work that run in step: the host waits once for all tensors that they need, then once for the next."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Asking, Sequence[Tensor]]] = []

    def begin(self, part: Asking) -> bool:
        """Run ``part`` until it asks for something; returns whether it does."""
        asked = next(part, None)
        if asked is not None:
            self._waiting.append((part, asked))
        return asked is not None

    def finish(self) -> None:
        """Run what has begun to its end."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            values = iter(on_host([x for _, asked in waiting for x in asked]))
            for part, asked in waiting:
                try:
                    self._waiting.append((part, part.send(list(islice(values, len(asked))))))
                except StopIteration:
                    continue


def size(layer: QuantisedLayer) -> int:
    """Bytes of the keys and values of a layer as :meth:`.layer.CompressedLayer.stored` has them."""
    keys, width = layer.keys, layer.keys.shape[3] + layer.values.shape[3]
    return keys.shape[:2].numel() * len(layer.index) * width * keys.element_size()


class LayerBatch:
    """Layers on one device with keys of one dtype and as many heads; a layer with packed keys is a batch of its own.

    rows : of each layer; ``R`` is the rows of all layers. width : slots of the longest layer; short ones end in padding.
    """

    def __init__(self, layers: Sequence[QuantisedLayer]) -> None:
        self.layers = list(layers)
        self.rows, self.width = len(layers[0].keys), max(len(layer.index) for layer in layers)

    @cached_property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[R, Hkv, K, D]``; see :meth:`.layer.CompressedLayer.keys_and_values`."""
        keys, values = zip(*(layer.keys_and_values() for layer in self.layers), strict=True)
        return self._joined(keys, 2), self._joined(values, 2)

    @cached_property
    def index(self) -> Tensor:
        """``[R, 1 or Hkv, K]`` int32, where every key came from; -1 for none."""
        heads = max(layer.index.by_head.shape[1] for layer in self.layers)
        return self._joined([layer.index.by_head.expand(-1, heads, -1) for layer in self.layers], 2, -1)

    @property
    def lengths(self) -> Tensor:
        """``[R, 1 or Hkv]`` long on the CPU, how many keys there are."""
        return torch.cat([layer.index.lengths.expand(-1, self.index.shape[1]) for layer in self.layers])

    @property
    def in_order(self) -> bool:
        """Whether all slots hold keys, in the order of their places."""
        return all(
            not layer.index.padded and layer.packed.untouched and len(layer.index) == self.width
            for layer in self.layers
        )

    @property
    def loose(self) -> Tensor:
        """``[R, 1 or Hkv, K]`` bool, keys that are not packed, and never were."""
        packed = any(not layer.packed.untouched for layer in self.layers)
        return (self.index >= 0) & ~self.layers[0].packed_once() if packed else self.index >= 0

    @cached_property
    def received(self) -> Tensor | None:
        """``[R, Hkv, K]`` float32, the figures of all slots, zero where there are none yet; None where there are none at
        all."""
        figures = [x for layer in self.layers if (x := layer.schedule.received) is not None]
        return self._joined(figures, 2) if figures else None

    @cached_property
    def merged(self) -> Tensor | None:
        """``[R, Hkv, K]`` float32, the number of tokens in each key that others were merged into, 0 for the rest; None where
        there is none."""
        memory, heads = self.layers[0].shared.memory(MergedKeys), self.layers[0].keys.shape[1]
        if memory is None:
            return None
        counts = [memory.of_slots(layer.number, layer.index.by_head).expand(-1, heads, -1) for layer in self.layers]
        return self._joined(counts, 2)

    @cached_property
    def threshold(self) -> Tensor | None:
        """``[R, Hkv]``, see :class:`.schedule_state.ScheduleState`."""
        bars = [x for layer in self.layers if (x := layer.schedule.threshold) is not None]
        return torch.cat(bars) if bars else None

    def queries(self, count: int) -> tuple[Tensor, Tensor]:
        """The last ``count`` queries that are remembered, ``[R, Hq, n, D]``, and their places ``[R, n]``."""
        queries = _by_forward([layer.schedule.queries for layer in self.layers], 2)
        places = _by_forward([layer.schedule.places for layer in self.layers], 1)
        first = max(0, places.shape[1] - count)
        return queries[:, :, first:], places[:, first:]

    def mask(self, places: Tensor, window: int | None) -> Tensor | None:
        """``[R, 1 or Hkv, q, K]`` bool: which keys the last queries, at ``places [R, q]``, see through a sliding ``window``;
        None where it is all up to their own."""
        seen = self.layers[0].seen
        if self.in_order and (window is None or seen <= window):
            return None
        return KeyIndex(self.index if self.index.shape[1] > 1 else self.index[:, 0], True, seen).mask(places, window)

    def observed(self, received: Tensor) -> None:
        """Take what was made of all queries up to here, ``[R, Hkv, K]`` float32."""
        self.received = received
        for layer, mine in zip(self.layers, received.split(self.rows), strict=True):
            layer.schedule.received, layer.schedule.unseen = mine, 0

    def needed_on_host(self, kept: Tensor) -> list[Tensor]:
        """See :meth:`.packed.QuantisedLayer.needed_on_host`; layers with packed keys come alone."""
        return self.layers[0].needed_on_host(kept) if len(self.layers) == 1 else []

    def evict(
        self,
        kept: Tensor,
        merged: tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | None = None,
        known: Sequence[Tensor] | None = None,
    ) -> None:
        """See :meth:`.packed.QuantisedLayer.evict`, for all rows."""
        if len(self.layers) == 1:
            self.layers[0].evict(kept, merged, lengths, known)
            return
        if merged is not None:
            keys, values = merged
        else:
            keys, values = self.stored
            if self.layers[0].latent:
                keys, values = values, keys[..., values.shape[3] :]
        left = KeptKeys.of(keys, values, self.index, kept, self.received, lengths)
        for layer, mine in zip(self.layers, left.split(self.rows), strict=True):
            layer.take(mine)

    def demote(self, group: TokenGroup, kept: Tensor, lengths: Tensor, query_energy: Mapping[int, Tensor]) -> None:
        """See :func:`.packed.demote`, for all rows; ``query_energy`` is by number of a layer."""
        each = zip(self.layers, kept.split(self.rows), lengths.split(self.rows), strict=True)
        for layer, mine, count in each:
            demote(layer, group, mine[..., : len(layer.index)], count, query_energy.get(layer.number))

    def _joined(self, parts: Sequence[Tensor], dim: int, fill: float = 0) -> Tensor:
        """The rows of all layers, of which each has its slots along ``dim``, filled up to one width."""
        sizes = {part.shape[dim] for part in parts}
        behind = (0,) * (2 * (parts[0].dim() - dim) - 1)
        if len(sizes) > 1:
            parts = [pad(part, (*behind, self.width - part.shape[dim]), value=fill) for part in parts]
        whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        missing = self.width - whole.shape[dim]
        return pad(whole, (*behind, missing), value=fill) if missing else whole


def _by_forward(blocks: list[tuple[Tensor, ...]], dim: int) -> Tensor:
    """The blocks of every layer one behind the other along ``dim``, the rows of all layers along the first axis: the layers
    of one forward are joined first, since steps are fewer than layers."""
    joined = [torch.cat(forward) if len(forward) > 1 else forward[0] for forward in zip(*blocks, strict=True)]
    return torch.cat(joined, dim=dim) if len(joined) > 1 else joined[0]
