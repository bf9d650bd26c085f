"""A cache layer that stores fewer keys than the tokens it has seen, and heads that store different counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mmaccel_kernels.compact import compact
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..errors import MmaccelError
from .decoding import reads_as_stored
from .incoming import Incoming
from .index import KeyIndex, leftmost
from .ragged import Ragged
from .room import append, trimmed
from .shared import Shared

_TENSORS = ("capacity", "received", "queries", "places", "threshold")


@dataclass
class ScheduleState:
    """What the schedule of a recipe carries from step to step beside the keys of one layer.

    capacity : ``[B, Hkv]`` long on the CPU, keys each head may hold; settled at the end of a prompt, when ``settled`` tokens
        were seen.
    received : ``[B, Hkv, K]`` float32, figures per stored slot (see :meth:`mmaccel.method.Policy.observe`).
    queries, places : ``[B, Hq, W, D]`` and ``[B, W]``, the last queries, for policies that look at them.
    threshold : ``[B, Hkv]``, the bar of merging that is averaged over calls.
    evicted : tokens seen when the layer was last evicted from.
    """

    capacity: Tensor | None = None
    received: Tensor | None = None
    queries: Tensor | None = None
    places: Tensor | None = None
    threshold: Tensor | None = None
    settled: int = 0
    evicted: int = 0

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is carried."""
        yield from (x for name in _TENSORS if (x := getattr(self, name)) is not None)

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[rows.to(tensor.device)])

    def remember(self, queries: Tensor, places: Tensor, window: int) -> None:
        """Append ``queries [B, Hq, q, D]`` of ``places [B, q]`` and keep the last ``window``."""
        if self.queries is not None and self.places is not None:
            queries, places = torch.cat([self.queries, queries], dim=2), torch.cat([self.places, places], dim=1)
        self.queries, self.places = queries[:, :, -window:].clone(), places[:, -window:].clone()

    def figures(self, like: Tensor) -> Tensor:
        """``received`` for the slots of ``like [B, Hkv, K, D]``, zero for those that came later."""
        out = like.new_zeros(like.shape[:3], dtype=torch.float32)
        if self.received is not None:
            out[..., : self.received.shape[-1]] = self.received
        return out


class CompressedLayer(DynamicLayer):
    """One layer's keys and values: ``keys``/``values [B, Hkv, K, D]``, after head-wise eviction behind a ragged part.

    Both have room for tokens to come behind them once one was added, see :func:`.room.append`.
    Only :meth:`update`, :meth:`stored`, :meth:`evict`, :meth:`crop` and the selection of rows know how they are stored.
    """

    keys: Any
    values: Any

    def __init__(self, shared: Shared, number: int) -> None:
        super().__init__()
        self.shared, self.number = shared, number
        self.seen = 0
        self.ragged: Ragged | None = None
        self.schedule = ScheduleState()

    @property
    def empty(self) -> bool:
        """Whether nothing was stored yet: there is no ``index``."""
        return self.shared.indices[self.number] is None

    @property
    def index(self) -> KeyIndex:
        """Where the stored keys came from; layers that store the same keys have one and the same.

        Raises
        ------
        RuntimeError
            If the layer is empty.
        """
        index = self.shared.indices[self.number]
        if index is None:
            raise RuntimeError(f"layer {self.number} of this cache is empty: it has no index")
        return index

    @index.setter
    def index(self, index: KeyIndex) -> None:
        self.shared.indices[self.number] = index

    @property
    def head_lengths(self) -> Tensor:
        """``[B, Hkv]`` long on the CPU: keys each head stores."""
        return self.index.lengths.expand(-1, self.keys.shape[1]).contiguous()

    @property
    def packed(self) -> bool:
        """Whether any keys are packed in pages."""
        return False

    @property
    def places(self) -> int | None:
        """How many keys there is a place for, over all rows and heads; None where only the device knows."""
        return self.keys.shape[:3].numel() + (0 if self.ragged is None else len(self.ragged.keys))

    @property
    def gapless(self) -> bool:
        """Whether the host knows that every place holds a key, so that lengths alone say what there is to attend to."""
        if not self.index.known:
            return False
        lengths = self.index.lengths
        return int(lengths.sum()) * (self.keys.shape[1] // lengths.shape[1]) == self.places

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns all that are to be read, ``[B, Hkv, K, D]``."""
        if self.shared.pinned is not None:
            return self.shared.pinned.write(self.number, key_states, value_states)
        incoming, new = self.shared.incoming, key_states.shape[-2]
        coming = None if incoming is None else incoming.coming
        self._note(incoming, len(key_states), new, key_states.device)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = append(self.keys, key_states, -2, coming)
        self.values = append(self.values, value_states, -2, coming)
        if incoming is None:
            return self.stored()
        if reads_as_stored(self, incoming, key_states):
            # the attention function finds the others
            return self.keys, self.values
        if incoming.sparse is not None and self.number >= incoming.sparse.first:
            return incoming.sparse.read(self.index, *self.stored())
        return self.stored()

    def _note(self, incoming: Incoming | None, rows: int, new: int, device: torch.device) -> None:
        """Note where ``new`` keys of every row came from; without a forward that says so they follow those seen."""
        if incoming is not None:
            phase = incoming.phase(self.number)
            self.seen += incoming.length
            if self.empty:
                self.index = phase.shared_index(self.seen, device)
            else:
                self.index.extend(phase.places, phase.padded, self.seen, phase.lengths, incoming.coming)
            return
        places = torch.arange(self.seen, self.seen + new, device=device).expand(rows, -1)
        self.seen += new
        if self.empty:
            self.index = KeyIndex(places, False, self.seen)
        else:
            self.index.extend(places, False, self.seen)

    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and values as ``[B, Hkv, K, D]``; heads that store fewer are padded (see ``index``)."""
        if self.ragged is None:
            return self.keys, self.values
        old_keys, old_values = self.ragged.padded()
        return torch.cat([old_keys, self.keys], dim=2), torch.cat([old_values, self.values], dim=2)

    def evict(self, kept: Tensor, merged: tuple[Tensor, Tensor] | None = None, lengths: Tensor | None = None) -> None:
        """Free everything but ``kept [B, Hkv or 1, K]`` bool, slots of :meth:`stored`. Rows, and heads, may keep different
        counts; a mask that is the same for all heads keeps the index so.

        Parameters
        ----------
        merged : replaces the stored keys and values, slot by slot.
        lengths : ``[B, Hkv or 1]`` long on the CPU, how many keys stay, where it is known; else the host waits for it.
        """
        keys, values = self.stored() if merged is None else merged
        b, heads = keys.shape[:2]
        index = self.index.by_head
        shape = (b, max(index.shape[1], kept.shape[1]), -1)
        index, kept = index.expand(shape), kept.expand(shape)
        kept = kept & (index >= 0)
        order, there, lengths = leftmost(kept, lengths)
        index = index.gather(2, order).masked_fill(~there, -1)
        padded = bool((lengths < order.shape[-1]).any())
        self.index = KeyIndex(index if shape[1] == heads else index[:, 0], padded, self.seen, lengths)
        if self.schedule.received is not None:
            figures = self.schedule.figures(keys).gather(2, order.expand(-1, heads, -1))
            self.schedule.received = figures.masked_fill(~there, 0.0)
        total = int(lengths.expand(b, heads if shape[1] == 1 else shape[1]).sum())
        flat = compact(keys, values, kept.expand(-1, heads, -1), total=total)
        if not padded:
            self.ragged = None
            self.keys, self.values = (x.view(b, heads, order.shape[-1], x.shape[-1]) for x in flat[:2])
        else:
            self.ragged = Ragged(*flat, longest=order.shape[-1])
            self.keys = keys.new_empty(b, heads, 0, keys.shape[-1])
            self.values = values.new_empty(b, heads, 0, values.shape[-1])

    def trim(self) -> None:
        """Give back what room is left for tokens that did not come."""
        if self.is_initialized:
            self.keys, self.values = trimmed(self.keys), trimmed(self.values)

    def get_seq_length(self) -> int:
        """Tokens seen, stored or not. Whoever goes on with a cache asks this first.

        Raises
        ------
        MmaccelError
            If a forward with this cache did not end.
        """
        if self.shared.broken:
            raise MmaccelError(
                "A forward with this cache was broken off, so that its layers may hold different tokens; begin again with a "
                "new cache, or call reset() on this one."
            )
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(stored + new, tokens no longer stored): what the bare model's mask needs if it continues this cache."""
        if self.shared.incoming is None:
            self.shared.check_bare(self.seen)
        stored = 0 if self.empty else len(self.index)
        return stored + query_length, self.seen - stored

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer holds."""
        if self.is_initialized:
            yield from (self.keys, self.values)
        if self.ragged is not None:
            yield from (self.ragged.keys, self.ragged.values, self.ragged.lengths)
        if not self.empty:
            yield from self.index.tensors()
        yield from self.schedule.tensors()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens seen (transformers counts them as a negative number)."""
        # 5.17 counts them in a tensor
        tokens_to_remove = int(tokens_to_remove)
        self.shared.unpin()
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number of tokens to remove")
        if tokens_to_remove == 0 or self.empty:
            return
        self.seen += tokens_to_remove
        if self.ragged is not None:
            index = self.index.by_head
            self.evict((index >= 0) & (index < self.seen))
            self.index.upto = self.seen
            return
        slots = self.index.crop(self.seen)
        if self.schedule.received is not None:
            self.schedule.received = self.schedule.figures(self.keys)[..., slots]
        self.keys, self.values = self.keys[:, :, slots], self.values[:, :, slots]

    def _select(self, rows: Tensor) -> None:
        self.shared.unpin()
        if self.number == 0:
            self.shared.select(rows)
        if self.is_initialized and self.keys.numel() + self.values.numel() > 0:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        elif self.is_initialized:
            self.keys = self.keys.new_empty(len(rows), *self.keys.shape[1:])
            self.values = self.values.new_empty(len(rows), *self.values.shape[1:])
        if self.ragged is not None:
            self.ragged = self.ragged.select(rows.to(self.ragged.keys.device))
        self.schedule.select(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows for beam search."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if not self.empty:
            # not the rows of what is shared, which the first layer has repeated already
            self._select(torch.arange(len(self.keys), device=self.keys.device).repeat_interleave(repeats))

    def reset(self) -> None:
        """Back to empty, ready for another prompt."""
        self.shared.unpin()
        # 5.17 keeps them, filled with zeros
        self.keys, self.values, self.is_initialized = None, None, False
        super().reset()
        self.seen, self.ragged, self.schedule = 0, None, ScheduleState()
        self.shared.indices[self.number] = None
        self.shared.reset()
