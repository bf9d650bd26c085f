"""A cache whose layers, and heads within a layer, store fewer keys than the tokens they have seen.

``generate`` makes an ordinary ``DynamicCache`` (or the caller brings one); :func:`adopt` swaps its layers in place. From
then on ``get_seq_length()`` answers with tokens *seen*, while each layer stores what it was told to keep. Where every stored
key came from is its :class:`KeyIndex`, from which causal, padding and sliding-window masks follow for any mix of lengths.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from mmaccel_kernels.compact import compact
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import MmaccelError, UnsupportedError
from .decoding import reads_as_stored
from .incoming import Incoming
from .index import KeyIndex, leftmost
from .sparse import SparseMemory


@dataclass
class Ragged:
    """Keys and values of heads that store different counts, one after the other: ``[total, D]``, ``lengths [B, Hkv]``.

    ``longest`` is the width of :meth:`padded`, at least the longest head; it does not change when rows are selected, as the
    width of the index does not.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    longest: int

    def padded(self) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, longest, D]`` each; short heads end in zeros."""
        flat = self.lengths.flatten()
        place = torch.arange(self.longest, device=self.keys.device)
        there = place < self.lengths[..., None]
        at = (flat.cumsum(0) - flat).view_as(self.lengths)[..., None] + place
        # one row more than there is stands for what is padded
        at = at.masked_fill(~there, len(self.keys))
        keys, values = (pad(x, (0, 0, 0, 1))[at] for x in (self.keys, self.values))
        return keys, values

    def select(self, rows: Tensor) -> Ragged:
        """Keep, repeat or reorder rows of the batch."""
        flat = self.lengths.flatten()
        start = (torch.cumsum(flat, 0) - flat).view_as(self.lengths)[rows].flatten()
        lengths = self.lengths[rows]
        reps = lengths.flatten()
        at = torch.arange(int(reps.sum()), device=reps.device)
        at = at + torch.repeat_interleave(start - (torch.cumsum(reps, 0) - reps), reps)
        return Ragged(self.keys[at], self.values[at], lengths, self.longest)


_CARRIED = ("capacity", "received", "queries", "places", "threshold")


@dataclass
class Carried:
    """What the schedule of a recipe carries from step to step beside the keys of one layer.

    capacity : ``[B, Hkv]`` long on the CPU, keys each head may hold; settled at the end of a prompt, when ``settled`` tokens
        were seen.
    received : ``[B, Hkv, K]`` float32, figures per stored slot (see :meth:`mmaccel.method.Policy.observe`).
    queries, places : ``[B, Hq, W, D]`` and ``[B, W]``, the last queries, for policies that look at them.
    threshold : ``[B, Hkv]``, the bar of merging that is averaged over calls.
    compacted : tokens seen when the layer was last compacted.
    """

    capacity: Tensor | None = None
    received: Tensor | None = None
    queries: Tensor | None = None
    places: Tensor | None = None
    threshold: Tensor | None = None
    settled: int = 0
    compacted: int = 0

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is carried."""
        yield from (x for name in _CARRIED if (x := getattr(self, name)) is not None)

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for name in _CARRIED:
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


def _nothing() -> None:
    """What a weak reference to something gone returns."""


class CompressedLayer(DynamicLayer):
    """One layer's keys and values: ``keys``/``values [B, Hkv, K, D]``, after head-wise eviction behind a ragged part.

    Only :meth:`update`, :meth:`stored`, :meth:`evict`, :meth:`crop` and the selection of rows know how they are stored.
    """

    keys: Any
    values: Any

    def __init__(self, state: CacheState, number: int) -> None:
        super().__init__()
        # were the two to hold each other, a cache would keep its memory until Python looks for cycles
        self._state = weakref.ref(state)
        self.number = number
        self.seen = 0
        self.index: KeyIndex | None = None
        self.ragged: Ragged | None = None
        self.carried = Carried()

    @property
    def state(self) -> CacheState:
        """What the layers share."""
        state = self._state()
        if state is None:
            raise RuntimeError("a layer without its cache can be looked at, but no longer be used")
        return state

    def __getstate__(self) -> dict[str, Any]:
        # a copy belongs to the copy of the state, which says so
        return {**vars(self), "_state": _nothing}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns all that are stored, ``[B, Hkv, K, D]``."""
        step = self.state.incoming
        phase = step.phase(self.number) if step is not None else None
        if step is not None and phase is not None:
            places, padded, length, lengths = phase.places, phase.padded, step.length, phase.lengths
        else:
            length, padded, lengths = key_states.shape[-2], False, None
            places = torch.arange(self.seen, self.seen + length, device=key_states.device).expand(len(key_states), -1)
        self.seen += length
        if self.index is not None:
            self.index.extend(places, padded, self.seen, lengths)
        elif phase is not None:
            self.index = phase.shared_index(self.seen, key_states.device)
        else:
            self.index = KeyIndex(places, padded, self.seen)
        super().update(key_states, value_states)
        if step is not None and reads_as_stored(self, step, key_states):
            # the attention function finds the others
            return self.keys, self.values
        if step is not None and step.sparse is not None and self.number >= step.sparse.first:
            return step.sparse.read(self.index, *self.stored())
        return self.stored()

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
        if self.index is None:
            raise RuntimeError("an empty layer has nothing to evict")
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
        if self.carried.received is not None:
            figures = self.carried.figures(keys).gather(2, order.expand(-1, heads, -1))
            self.carried.received = figures.masked_fill(~there, 0.0)
        total = int(lengths.expand(b, heads if shape[1] == 1 else shape[1]).sum())
        flat = compact(keys, values, kept.expand(-1, heads, -1), total=total)
        if not padded:
            self.ragged = None
            self.keys, self.values = (x.view(b, heads, order.shape[-1], x.shape[-1]) for x in flat[:2])
        else:
            self.ragged = Ragged(*flat, longest=order.shape[-1])
            self.keys = keys.new_empty(b, heads, 0, keys.shape[-1])
            self.values = values.new_empty(b, heads, 0, values.shape[-1])

    def get_seq_length(self) -> int:
        """Tokens seen, stored or not. Whoever goes on with a cache asks this first.

        Raises
        ------
        MmaccelError
            If a forward with this cache did not end.
        """
        state = self._state()
        if state is not None and state.broken:
            raise MmaccelError(
                "A forward with this cache was broken off, so that its layers may hold different tokens; begin again with a "
                "new cache, or call reset() on this one."
            )
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(stored + new, tokens no longer stored): what the bare model's mask needs if it continues this cache."""
        if self.state.incoming is None:
            self.state.check_bare()
        stored = len(self.index) if self.index is not None else 0
        return stored + query_length, self.seen - stored

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer holds."""
        if self.is_initialized:
            yield from (self.keys, self.values)
        if self.ragged is not None:
            yield from (self.ragged.keys, self.ragged.values, self.ragged.lengths)
        if self.index is not None:
            yield from self.index.tensors()
        yield from self.carried.tensors()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens seen (transformers counts them as a negative number)."""
        # 5.17 counts them in a tensor
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number of tokens to remove")
        if tokens_to_remove == 0 or self.index is None:
            return
        self.seen += tokens_to_remove
        if self.ragged is not None:
            index = self.index.by_head
            self.evict((index >= 0) & (index < self.seen))
            self.index.upto = self.seen
            return
        slots = self.index.crop(self.seen)
        if self.carried.received is not None:
            self.carried.received = self.carried.figures(self.keys)[..., slots]
        self.keys, self.values = self.keys[:, :, slots], self.values[:, :, slots]

    def _select(self, rows: Tensor) -> None:
        if self.number == 0:
            self.state.select(rows)
        if self.is_initialized and self.keys.numel() + self.values.numel() > 0:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        elif self.is_initialized:
            self.keys = self.keys.new_empty(len(rows), *self.keys.shape[1:])
            self.values = self.values.new_empty(len(rows), *self.values.shape[1:])
        if self.ragged is not None:
            self.ragged = self.ragged.select(rows.to(self.ragged.keys.device))
        self.carried.select(rows)

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
        if self.index is not None:
            # not the rows of the state, which the first layer has repeated already
            self._select(torch.arange(len(self.keys), device=self.keys.device).repeat_interleave(repeats))

    def reset(self) -> None:
        """Back to empty, ready for another prompt."""
        super().reset()
        self.seen, self.index, self.ragged, self.carried = 0, None, None, Carried()
        self.state.offset = self.state.ahead = self.state.kinds = self.state.visual = self.state.recall = None
        self.state.incoming, self.state.broken = None, False


class CacheState:
    """What the layers of one cache share.

    offset : ``[B]`` long: logical length minus next position. The next token of row b stands at
        ``get_seq_length() - offset[b]``; M-RoPE, left padding and renumbering are all in this one number.
    ahead : ``[B]`` long: with M-RoPE the last frames of a slow clip may stand at later positions than the question behind them.
        transformers goes on behind the question while it generates, and behind the frames, so much further, in the next
        turn and in a forward without positions. None once that has happened.
    step : the forward being run, while one is.
    kinds : ``[B, n, 4]`` int32, for the first ``n`` places (picture, t, row, column), -1 for text and for what has no cell;
        only where a recipe goes on compacting while it decodes.
    visual : ``[B, n]`` bool, which of the first ``n`` places are visual; only where text has a codec of its own.
    recall : what a recipe carries that reads other keys at every step.
    stream : all pictures are stretches of one clip, whose frames are counted on.
    broken : a forward was broken off; layers may hold different tokens.
    windowed : some layers of the model have sliding windows.
    """

    def __init__(self, layers: int) -> None:
        from .packed import QuantisedLayer

        self.layers = [QuantisedLayer(self, i) for i in range(layers)]
        self.offset: Tensor | None = None
        self.ahead: Tensor | None = None
        self.incoming: Incoming | None = None
        self.shared = self
        self.kinds: Tensor | None = None
        self.visual: Tensor | None = None
        self.recall: SparseMemory | None = None
        self.stream = False
        self.broken = False
        self.windowed = False

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)
        for layer in self.layers:
            layer._state = weakref.ref(self)

    @property
    def seen(self) -> int:
        """Tokens seen."""
        return self.layers[0].seen

    def check_bare(self) -> None:
        """Called when a model goes on with this cache that mmaccel does not shape.

        Raises
        ------
        UnsupportedError
            If its masks, which know lengths alone, would be wrong: tokens were dropped, and rows, heads or layers differ in
            what is left of them, or windows count places.
        """
        indices = list({id(layer.index): layer.index for layer in self.layers if layer.index is not None}.values())
        differ = len({len(index) for index in indices}) > 1 or any(index.padded for index in indices)
        if (differ or self.windowed) and any(len(index) != self.seen for index in indices):
            raise UnsupportedError(
                "This cache holds what mmaccel left of its prompt, which this model would misread now; accelerate the model "
                "again to go on, or begin with a new cache."
            )

    def settle(self, whole: bool) -> None:
        """The forward is over, as a ``whole`` or broken off: let go of it, and of the masks that were made for it."""
        self.incoming = None
        self.broken |= not whole
        for layer in self.layers:
            if layer.index is not None:
                layer.index.forget()

    def note_visual(self, visual: Tensor, since: int) -> None:
        """Remember which places from ``since`` on are visual, ``[B, S]`` bool."""
        before = visual[:, :0] if self.visual is None else self.visual[:, :since]
        self.visual = torch.cat([pad(before, (0, since - before.shape[1])), visual], dim=1)

    def split(self, at: int) -> None:
        """Let layers from ``at`` on have indices of their own: they are about to store other tokens than those before."""
        clones: dict[int, KeyIndex] = {}
        for layer in self.layers[at:]:
            if layer.index is not None:
                layer.index = clones.setdefault(id(layer.index), layer.index.clone())

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of what is shared."""
        on_host = rows.cpu()
        for index in {id(layer.index): layer.index for layer in self.layers if layer.index is not None}.values():
            index.select(rows, on_host)
        if self.offset is not None:
            self.offset = self.offset[rows.to(self.offset.device)]
        if self.ahead is not None:
            self.ahead = self.ahead[rows.to(self.ahead.device)]
        if self.kinds is not None:
            self.kinds = self.kinds[rows.to(self.kinds.device)]
        if self.visual is not None:
            self.visual = self.visual[rows.to(self.visual.device)]
        if self.recall is not None:
            self.recall.select(rows)

    def snapshot(self) -> Callable[[], None]:
        """Remember what is stored. The function that comes back restores it; nothing is copied, since tensors are never
        changed in place."""
        clones: dict[int, KeyIndex] = {}
        mine = dict(vars(self), recall=None if self.recall is None else replace(self.recall))
        layers = [
            dict(
                vars(layer),
                carried=replace(layer.carried),
                index=None if layer.index is None else clones.setdefault(id(layer.index), layer.index.clone()),
            )
            for layer in self.layers
        ]

        def restore() -> None:
            self.__dict__.update(mine)
            for layer, attributes in zip(self.layers, layers, strict=True):
                layer.__dict__.update(attributes)

        return restore

    def rebase(self) -> None:
        """Forget places that no layer stores any more and count the others anew, so that nothing grows with what was seen.

        Positions stay; distances between places shrink, so that models with sliding windows cannot be rebased.
        """
        seen, held = self.seen, None
        indices = {id(layer.index): layer.index for layer in self.layers if layer.index is not None}
        for index in indices.values():
            held = torch.zeros(seen + 1, dtype=torch.bool, device=index.index.device) if held is None else held
            held[torch.where(index.index < 0, seen, index.index).flatten().long().to(held.device)] = True
        if held is None or bool(held[:seen].all()):
            return
        left = int(held[:seen].sum())
        new = held[:seen].cumsum(0) - 1
        for index in indices.values():
            index.rename(new.to(index.index), left)
        for layer in self.layers:
            layer.carried.settled -= seen - left
            layer.carried.compacted -= seen - left
            layer.seen = left
        if self.offset is not None:
            self.offset = self.offset - (seen - left)
        if self.kinds is not None:
            self.kinds = self.kinds[:, held[: self.kinds.shape[1]].to(self.kinds.device)]
        if self.visual is not None:
            self.visual = self.visual[:, held[: self.visual.shape[1]].to(self.visual.device)]
        if self.recall is not None:
            self.recall = SparseMemory(self.recall.count)

    def nbytes(self) -> int:
        """Bytes held, counted on unique storages."""
        tensors = [t for layer in self.layers for t in layer.tensors()]
        tensors += [t for t in (self.offset, self.ahead, self.kinds, self.visual) if t is not None]
        tensors += self.recall.tensors() if self.recall is not None else []
        return sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values()
        )


def state_of(cache: Any) -> CacheState | None:
    """The state of an adopted cache, or None."""
    return getattr(cache, "mmaccel", None)


def cache_bytes(cache: Any) -> int:
    """Bytes that any transformers cache holds, adopted or not, counted on unique storages."""
    state = state_of(cache)
    if state is not None:
        return state.nbytes()
    tensors = [t for layer in getattr(cache, "layers", ()) for t in (layer.keys, layer.values) if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_plain(cache: Cache) -> None:
    """Raise :class:`UnsupportedError` unless the layers of this cache can be adopted."""
    if getattr(cache, "offloading", False) or not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
        kinds = {type(layer).__name__ for layer in cache.layers}
        raise UnsupportedError(
            f"mmaccel needs a plain DynamicCache, not {type(cache).__name__} with {', '.join(sorted(kinds)) or 'offloading'}; "
            "leave out past_key_values and cache_implementation."
        )


def adopt(cache: Cache, layers: int, valid: Tensor | None) -> CacheState:
    """Swap the layers of a dynamic cache in place; what it already holds stays.

    Parameters
    ----------
    layers : how many layers the language model has.
    valid : ``[B, stored]`` bool, which of the stored tokens are no padding; None if none is.

    Raises
    ------
    UnsupportedError
        If the cache is static, quantised, offloaded, or has slid already.
    """
    check_plain(cache)
    state, first = CacheState(layers), None
    held: list[Any] = list(cache.layers)
    state.windowed = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in held)
    for old, new in zip(held, state.layers, strict=False):
        if not old.is_initialized or old.get_seq_length() == 0:
            continue
        slid = isinstance(old, DynamicSlidingWindowLayer)
        if slid and old.keys.shape[-2] != old.get_seq_length():
            raise UnsupportedError(
                "This cache has already dropped keys beyond its sliding window; start a new cache with the picture in it."
            )
        stored = old.keys.shape[-2]
        if first is None:
            places = torch.arange(stored, device=old.keys.device).expand(len(old.keys), -1)
            padded = valid is not None and not bool(valid.all())
            first = KeyIndex(places if valid is None else places.masked_fill(~valid, -1), padded, stored)
            lengths = valid.sum(1) if valid is not None else torch.full((len(old.keys),), stored)
            state.offset = stored - lengths.to(old.keys.device)
        new.keys, new.values, new.dtype, new.device = old.keys, old.values, old.dtype, old.device
        new.is_initialized, new.seen, new.index = True, stored, first
    cache.layers = list(state.layers)
    cache.layer_class_to_replicate = None
    cache.__dict__["mmaccel"] = state
    return state
