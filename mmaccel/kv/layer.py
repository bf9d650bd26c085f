"""A cache layer that stores fewer keys than the tokens it has seen, and heads that store different counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mmaccel_kernels.compact import Compacted, compact
from torch import Tensor

from ..core.precision import in_attention_dtype
from ..core.transformers_api import DynamicLayer
from .decoding import reads_as_stored
from .forward_info import ForwardInfo, Phase
from .growable import append, trimmed
from .host_layer import HostLayer
from .index import KeyIndex, to_device
from .packed_keys import PackedKeys
from .ragged import Ragged
from .schedule_state import ScheduleState
from .selection import Selection
from .shared import Shared


def bare_bytes(keys: Tensor, values: Tensor) -> int:
    """Bytes that a ``DynamicCache`` holds of one token in one head, whose key and value are given so."""
    if keys.dtype != values.dtype:
        # transformers 5.23 stores both in the dtype of the keys, 5.24 each in its own
        keys, values = DynamicLayer().update(keys[:, :, :0], values[:, :, :0])
    return keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()


@dataclass(frozen=True)
class KeptKeys:
    """The keys that are left of ``R`` rows, on their way into layers.

    flat : of all heads, one after the other. index : ``[R, 1 or Hkv, W]``, where they came from, and ``lengths [R, 1 or Hkv]``
    on the CPU, how many each head has. received : ``[R, Hkv, W]``, see :class:`.schedule_state.ScheduleState`.
    selection : which they are; None for some of its rows.
    """

    flat: Compacted
    index: Tensor
    lengths: Tensor
    received: Tensor | None
    selection: Selection | None = None

    @staticmethod
    def of(
        keys: Tensor,
        values: Tensor,
        index: Tensor,
        kept: Tensor,
        received: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> KeptKeys:
        """Take the ``kept [R, Hkv or 1, K]`` bool of ``keys`` and ``values [R, Hkv, K, D]`` from ``index [R, 1 or Hkv, K]``.
        ``lengths [R, Hkv or 1]`` long on the CPU say how many that are, where it is known; else the host waits for it."""
        return KeptKeys.selected(keys, values, Selection.of(index, kept, keys.shape[1], lengths), received)

    @staticmethod
    def selected(keys: Tensor, values: Tensor, left: Selection, received: Tensor | None) -> KeptKeys:
        """Take what is ``left`` of ``keys`` and ``values [R, Hkv, K, D]``."""
        flat = compact(keys, values, left.plan)
        return KeptKeys(flat, left.index, left.lengths, left.figures(received), left)

    def ragged(self) -> Ragged:
        """As they are stored where heads keep different counts."""
        known = {} if self.selection is None else {"bounds": self.selection.bounds}
        return Ragged(*self.flat, longest=self.index.shape[-1], **known)

    def split(self, rows: int) -> Iterator[KeptKeys]:
        """So many rows at a time, and of them no more slots than they need; nothing is copied."""
        heads, begin = self.flat.lengths.shape[1], 0
        for row in range(0, len(self.index), rows):
            mine = slice(row, row + rows)
            lengths = self.lengths[mine]
            end, width = begin + int(lengths.expand(-1, heads).sum()), int(lengths.max())
            flat = Compacted(self.flat.keys[begin:end], self.flat.values[begin:end], self.flat.lengths[mine])
            received = None if self.received is None else self.received[mine, :, :width]
            yield KeptKeys(flat, self.index[mine, :, :width], lengths, received)
            begin = end


class CompressedLayer(HostLayer):
    """One layer's keys and values: ``keys``/``values [B, Hkv, K, D]``, after head-wise eviction behind a ragged part.

    Both have room for tokens to come behind them once one was added, see :func:`.growable.append`.
    Only :meth:`update`, :meth:`stored`, :meth:`evict`, :meth:`crop` and the selection of rows know how they are stored.

    Keys and values have one dtype, see :func:`mmaccel.core.precision.in_attention_dtype`.

    window : places back that the attention of the layer reaches, as of the last forward; None for all.
    prefix : keys before these that rows have in common, see :meth:`.packed.QuantisedLayer.share`; nothing is ragged then.
    bare_bytes : what the bare model's cache would hold of one token in one head.
    """

    def __init__(self, shared: Shared, number: int) -> None:
        super().__init__(shared, number)
        self.seen = 0
        self.bare_bytes = 0
        self.window: int | None = None
        self.packed = PackedKeys()
        self.schedule = ScheduleState()

    @property
    def empty(self) -> bool:
        """Whether nothing was stored yet: there is no ``index``."""
        return self.shared.indices[self.number] is None

    @property
    def index(self) -> KeyIndex:
        """Index of the stored keys; layers that store the same keys share one.

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
    def places(self) -> int | None:
        """Number of keys that there is room for, over all rows and heads; None where only the device knows."""
        packed = self.packed.places
        if packed is None:
            return None
        prefix = 0 if self.prefix is None else self.prefix.places
        return prefix + packed + self.keys.shape[:3].numel() + (0 if self.ragged is None else len(self.ragged.keys))

    @property
    def gapless(self) -> bool:
        """Whether the host knows that every place holds a key, so that lengths alone say what there is to attend to."""
        index = self.index
        return index.known and index.held(self.keys.shape[1]) == self.places

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns all that are to be read, ``[B, Hkv, K, D]``."""
        given = key_states, value_states
        key_states, value_states = in_attention_dtype(*given)
        if self.shared.static_view is not None:
            return self.shared.static_view.layers[self.number].write(key_states, value_states)
        incoming, new = self.shared.incoming, key_states.shape[-2]
        expected, following = (None, 0) if incoming is None else (incoming.expected_new_tokens, incoming.following)
        if self.shared.host is not None:
            following = self.room_on_device(new, expected, following)
        self._note(incoming, key_states.shape[0], new, key_states.device)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.bare_bytes = bare_bytes(*given)
        elif self.keys.dtype != key_states.dtype:
            # an earlier call ran in another precision: the wider one holds the keys of both
            dtype = torch.promote_types(self.keys.dtype, key_states.dtype)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
            self.keys, self.values = self.keys.to(dtype), self.values.to(dtype)
            self.ragged = self.ragged and self.ragged.to(dtype)
            self.prefix = self.prefix and self.prefix.to(dtype)
        self.keys = append(self.keys, key_states, -2, expected, following)
        self.values = append(self.values, value_states, -2, expected, following)
        if incoming is None:
            return self.stored()
        if reads_as_stored(self, incoming, key_states):
            # the attention function finds the others
            return self.keys, self.values
        if (sparse := incoming.sparse(self.number)) is None:
            return self.stored()
        keys, values = sparse.read(self.index, *self.stored())
        if self.shared.host is not None and self.number in incoming.where_parked:
            self.shared.host.moved.read += keys.nbytes + values.nbytes
        return keys, values

    def _note(self, incoming: ForwardInfo | None, rows: int, new: int, device: torch.device) -> None:
        """Note where ``new`` keys of every row came from; without a forward that says so they follow those seen."""
        if incoming is None:
            places = torch.arange(self.seen, self.seen + new, device=device).expand(rows, -1)
            incoming = ForwardInfo(self.seen, new, False, [(0, Phase(places, False))])
        phase = incoming.phase(self.number)
        self.seen += incoming.length
        if self.empty:
            self.index = phase.shared_index(self.seen, device)
        else:
            self.index.extend(phase.places, phase.padded, self.seen, phase.lengths, incoming.expected_new_tokens)

    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and values as ``[B, Hkv, K, D]``; heads that store fewer are padded (see ``index``)."""
        if (before := self.prefix or self.ragged) is None:
            return self.keys, self.values
        old_keys, old_values = before.padded()
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
        received = self.schedule.figures(keys.shape[2])
        self.take(KeptKeys.of(keys, values, self.index.by_head, kept, received, lengths))

    def take(self, left: KeptKeys) -> None:
        """Store what is left, and nothing else."""
        (rows, heads), width, lengths = left.flat.lengths.shape, left.index.shape[-1], left.lengths
        padded = bool((lengths < width).any())
        index = left.index if left.index.shape[1] == heads else left.index[:, 0]
        self.index = KeyIndex(index, padded, self.seen, lengths)
        self.schedule.received = left.received
        keys, values = left.flat[:2]
        self.prefix = None
        if not padded:
            self.ragged = None
            self.keys, self.values = (x.view(rows, heads, width, x.shape[-1]) for x in (keys, values))
        else:
            self.ragged = left.ragged()
            self.keys = keys.new_empty(rows, heads, 0, keys.shape[-1])
            self.values = values.new_empty(rows, heads, 0, values.shape[-1])
        self._park()

    def trim(self) -> None:
        """Give back what room is left for tokens that did not come."""
        if self.is_initialized:
            self.keys, self.values = trimmed(self.keys), trimmed(self.values)
        if self.ragged is not None:
            self.ragged.trim()

    def get_seq_length(self) -> int:
        """Tokens seen, stored or not. Whoever continues a cache asks this first: a forward that was broken off raises."""
        self.shared.check_whole()
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
        if (before := self.prefix or self.ragged) is not None:
            yield from before.tensors()
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
        self.shared.crop(self.seen)
        self.schedule.crop(-tokens_to_remove)
        self._crop_stored()
        self._park()

    def _crop_stored(self) -> None:
        """Drop keys of the places from ``seen`` on."""
        if self.ragged is not None:
            index = self.index.by_head
            self.evict((index >= 0) & (index < self.seen))
            self.index.upto = self.seen
            return
        slots = self.index.crop(self.seen)
        received = self.schedule.figures(len(slots))
        self.schedule.received = None if received is None else received[..., slots]
        if self.prefix is not None and bool(slots[: self.prefix.width].all()):
            slots = slots[self.prefix.width :]
        elif self.prefix is not None:
            (self.keys, self.values), self.prefix = self.stored(), None
        self.keys, self.values = self.keys[:, :, slots], self.values[:, :, slots]

    def _select(self, rows: Tensor) -> None:
        self.shared.unpin()
        if self.number == 0:
            self.shared.select(rows)
        if self.is_initialized and self.keys.numel() + self.values.numel() > 0:
            rows = to_device(rows, self.keys.device)
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        elif self.is_initialized:
            self.keys = self.keys.new_empty(len(rows), *self.keys.shape[1:])
            self.values = self.values.new_empty(len(rows), *self.values.shape[1:])
        if self.ragged is not None:
            self.ragged = self.ragged.select(rows.to(self.ragged.keys.device))
        self.prefix = self.prefix and self.prefix.select(rows)
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
        self.seen, self.ragged, self.prefix, self.packed, self.schedule = 0, None, None, PackedKeys(), ScheduleState()
        self.shared.indices[self.number] = None
        self.shared.reset()
