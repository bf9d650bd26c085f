"""A cache whose layers, and heads within a layer, store fewer keys than the tokens they have seen.

``generate`` makes an ordinary ``DynamicCache`` (or the caller brings one); :func:`adopt` swaps its layers in place. From
then on ``get_seq_length()`` answers with tokens *seen*, while each layer stores what it was told to keep. Where every
stored key came from is its :class:`.index.KeyIndex`, from which causal, padding and sliding-window masks follow for any mix of
lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.precision import in_attention_dtype
from ..core.transformers_api import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    cache_in,
)
from ..errors import UnsupportedError
from .forward_info import ForwardInfo
from .host import parked
from .index import KeyIndex
from .key_bias import Rotations
from .latent_layer import LatentLayer
from .layer import bare_bytes as bare_token_bytes
from .packed import QuantisedLayer
from .positions import NextPositions
from .recurrent import RecurrentLayer, attributes_of, states_of
from .shared import Shared
from .static_view import QuerySpec, Reader, StaticView


class CacheState:
    """The layers of one cache, and what they share. Layers know what is shared, and nothing knows a layer but this.

    Parameters
    ----------
    layers : how many layers the language model has.
    recurrent : those of them that keep a recurrent state. All that is said of ``layers`` here and by methods counts the others
        alone; ``every`` has both, in the order of the model.
    latent : whether layers store latents in place of keys and values.
    """

    def __init__(self, layers: int, recurrent: Collection[int] = (), latent: bool = False) -> None:
        self.shared = Shared([None] * (layers - len(recurrent)))
        kind = LatentLayer if latent else QuantisedLayer
        self.layers: list[QuantisedLayer] = [kind(self.shared, number) for number in range(layers - len(recurrent))]
        self.recurrent = [RecurrentLayer() for _ in recurrent]
        kept, states = iter(self.layers), iter(self.recurrent)
        self.every = [next(states) if number in recurrent else next(kept) for number in range(layers)]

    @property
    def seen(self) -> int:
        """Tokens seen."""
        return self.layers[0].seen

    @property
    def whole(self) -> bool:
        """Whether all tokens seen are stored in full precision."""
        lengths = {len(index) for index in self.shared.each()}
        return lengths <= {self.seen} and all(layer.packed.untouched for layer in self.layers)

    @property
    def positions(self) -> NextPositions:
        """Next positions of the rows."""
        return self.shared.positions

    @positions.setter
    def positions(self, positions: NextPositions) -> None:
        self.shared.positions = positions

    def note_rotations(self, incoming: ForwardInfo) -> None:
        """Keep what tokens of this forward are turned by, before any key is packed without its bias; once a forward, when the
        first layer has its keys."""
        noted, incoming.rotations = incoming.rotations, None
        if noted is None:
            return
        cos, sin, before = noted
        places = incoming.phases[0][1].places.to(cos.device, non_blocking=True)
        # tokens that come back stand before the others, and were noted with their prompt
        places = places[:, -cos.shape[1] :]
        if cos.dim() != 3 or cos.shape[1] != places.shape[1] or cos.shape[2] != self.layers[0].keys.shape[3]:
            return
        memory = self.shared.memory(Rotations)
        if memory is None:
            memory = self.shared.keep(Rotations.none(cos.expand(len(places), -1, -1)))
        # what was packed before the first note was packed with its bias
        late = not memory.cos.shape[1] and any(layer.packed.any_pages for layer in self.layers)
        memory.note(cos, sin, places, incoming.seen, incoming.length, None if late else before)

    def finalize(self, whole: bool) -> None:
        """The forward is over, as a ``whole`` or broken off."""
        self.shared.finalize(whole)

    def pin(
        self,
        steps: int,
        query_spec: QuerySpec | None = None,
        before: StaticView | None = None,
        readers: Mapping[int, Reader] | None = None,
        block: int = 1,
    ) -> StaticView:
        """Let nothing move for ``steps`` tokens to come, until :meth:`unpin`; in the tensors of what it was pinned to
        ``before``, where they serve. For ``query_spec``, ``readers`` and ``block`` see :class:`.static_view.StaticView`."""
        self.unpin()
        offset, weights = self.positions.offset, self.shared.places.weights
        if offset is None:
            raise RuntimeError("a cache that holds no reduced prompt cannot be pinned")
        if before is None or weights is not None or not before.reuse(offset, steps, query_spec, block):
            before = StaticView(self.layers, offset, steps, query_spec, readers, weights, block)
        self.shared.static_view = before
        return before

    def unpin(self) -> None:
        """Let layers and indices have what was added since :meth:`pin`."""
        self.shared.unpin()

    def trim(self) -> None:
        """Give back what room is left for tokens that did not come; that in host memory stays."""
        if self.shared.host is not None:
            return
        for layer in self.layers:
            layer.trim()
        for index in self.shared.each():
            index.trim()

    def snapshot(self) -> Callable[[], None]:
        """Remember what is stored. The function that comes back restores it; no keys and values are copied, since what a
        tensor of them shows is never changed in place."""
        self.unpin()
        shared, states = self.shared.copy(), [layer.snapshot() for layer in self.recurrent]
        layers = [dict(vars(layer), schedule=replace(layer.schedule)) for layer in self.layers]

        def restore() -> None:
            self.shared.__dict__.update(vars(shared))
            for layer, attributes in zip(self.layers, layers, strict=True):
                layer.__dict__.update(attributes)
            for restored in states:
                restored()

        return restore

    def copy(self) -> CacheState:
        """A state to change independently. Keys and values are not copied, since what a tensor of them shows is never changed
        in place. Raises UnsupportedError if they are in host memory, which belongs to one cache."""
        if self.shared.host is not None:
            raise UnsupportedError(
                "A cache in host memory cannot be copied or shared by the rows of a batch; leave out offload='host'."
            )
        self.unpin()
        recurrent = [number for number, layer in enumerate(self.every) if isinstance(layer, RecurrentLayer)]
        state = CacheState(len(self.every), recurrent, isinstance(self.layers[0], LatentLayer))
        state.shared.__dict__.update(vars(self.shared.copy()))
        for layer, mine in zip(state.layers, self.layers, strict=True):
            layer.__dict__.update(vars(mine), shared=state.shared, schedule=replace(mine.schedule))
        for states, before in zip(state.recurrent, self.recurrent, strict=True):
            states.take(before.copy())
        return state

    def selected(self, rows: Tensor, share: bool = True) -> CacheState:
        """A state whose rows continue the ``rows [n]`` long of this one, which stays as it is. What several rows continue is
        stored once, see :meth:`.packed.QuantisedLayer.share`, unless it is not to be ``share``-d."""
        state, share = self.copy(), share and len(rows.unique()) < len(rows)
        for layer in state.layers:
            if share:
                layer.share(rows)
            else:
                layer.batch_select_indices(rows)
        for states in state.recurrent:
            states.batch_select_indices(rows)
        return state

    def rebase(self) -> None:
        """Forget places that no layer stores any more and count the others anew, so that nothing grows with what was seen.

        Positions stay; distances between places shrink, so that models with sliding windows cannot be rebased.
        """
        seen = self.seen
        left = self.shared.rebase(seen)
        if left == seen:
            return
        for layer in self.layers:
            layer.schedule.rebase(seen - left)
            layer.seen = left

    def nbytes(self) -> int:
        """Bytes held, counted on unique storages; room for tokens to come is among them."""
        return _nbytes([*self.shared.tensors(), *(t for layer in self.every for t in layer.tensors())])

    def host_nbytes(self) -> int:
        """Bytes of keys and values in host memory."""
        return _nbytes(parked(t for layer in self.layers for t in layer.tensors()))


def state_of(cache: Any) -> CacheState | None:
    """The state of an adopted cache, or None."""
    return getattr(cache, "mmaccel", None)


def cache_with(state: CacheState) -> Cache:
    """A dynamic cache with the layers of ``state``."""
    cache = DynamicCache()
    return _adopted(cache, state)


def _adopted(cache: Cache, state: CacheState) -> Cache:
    cache.layers = list(state.every)
    cache.layer_class_to_replicate = None
    cache.__dict__["mmaccel"] = state
    return cache


def static_view_of(kwargs: Mapping[str, Any]) -> StaticView | None:
    """Static view of the cache among the arguments of a forward, if it has one."""
    state = state_of(cache_in(kwargs))
    return None if state is None else state.shared.static_view


def crop(cache: Any, count: int) -> None:
    """Forget the last ``count`` tokens of a dynamic cache, adopted or not; what is pinned stays where it is."""
    state = state_of(cache)
    if state is None or state.shared.static_view is None:
        cache.crop(-count)
    else:
        state.shared.static_view.crop(count)


def snapshot(cache: Any) -> Callable[[], None]:
    """Remember what a dynamic cache holds, adopted or not. The function that comes back restores it, once. Only recurrent
    states are copied: no tensor of keys and values is changed in place."""
    if (state := state_of(cache)) is not None:
        return state.snapshot()
    layers = list(cache.layers)
    held = [attributes_of(x) if isinstance(x, LinearAttentionLayer) else dict(vars(x)) for x in layers]

    def restore() -> None:
        for layer, attributes in zip(layers, held, strict=True):
            layer.__dict__.update(attributes)

    return restore


def cache_bytes(cache: Any) -> int:
    """Bytes that any transformers cache holds, adopted or not, counted on unique storages; see :meth:`CacheState.nbytes`."""
    state = state_of(cache)
    if state is not None:
        return state.nbytes()
    tensors: list[Tensor | None] = []
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, LinearAttentionLayer):
            tensors += states_of(layer)
        else:
            tensors += (layer.keys, layer.values, getattr(layer, "indexer_keys", None))
    return _nbytes([t for t in tensors if t is not None])


def _nbytes(tensors: list[Tensor]) -> int:
    """Bytes of unique storages."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def bare_bytes(cache: Any, config: Any) -> int:
    """Bytes that the cache of a text model with this ``config`` would hold had nothing been dropped or packed: every token that
    was seen, but for those behind sliding windows."""
    state = state_of(cache)
    if state is None:
        return cache_bytes(cache)
    total = _nbytes([x for layer in state.recurrent for x in layer.tensors()])
    plainly = [layer for layer in DynamicCache(config=config).layers if isinstance(layer, DynamicLayer)]
    for layer, plain in zip(state.layers, plainly, strict=False):
        if layer.is_initialized:
            window = getattr(plain, "sliding_window", None)
            tokens = layer.seen if window is None else min(layer.seen, window - 1)
            rows, heads = layer.keys.shape[:2]
            total += rows * heads * tokens * layer.bare_bytes
    return total


def check_plain(cache: Cache) -> None:
    """Raise :class:`UnsupportedError` unless the layers of this cache can be adopted."""
    plain = (DynamicLayer, LinearAttentionLayer)
    if getattr(cache, "offloading", False):
        raise UnsupportedError(
            "mmaccel cannot use an offloaded cache of transformers, which moves a layer before its attention has run; leave it "
            "out, and give offload='host' to accelerate_vlm, which keeps keys and values in host memory."
        )
    if not all(isinstance(layer, plain) for layer in cache.layers):
        kinds = {type(layer).__name__ for layer in cache.layers}
        raise UnsupportedError(
            f"mmaccel needs a plain DynamicCache, not {type(cache).__name__} with {', '.join(sorted(kinds))}; "
            "leave out the cache and cache_implementation."
        )


def adopt(
    cache: Cache, layers: int, valid: Tensor | None, recurrent: Collection[int] = (), latent: bool = False
) -> CacheState:
    """Swap the layers of a dynamic cache in place; what it already holds stays.

    Parameters
    ----------
    layers, recurrent : how many layers the language model has, and which of them keep a recurrent state.
    valid : ``[B, stored]`` bool, which of the stored tokens are no padding; None if none is.
    latent : whether layers store latents, see :class:`CacheState`.

    Raises
    ------
    UnsupportedError
        If the cache is static, quantised, offloaded, or has slid already.
    """
    check_plain(cache)
    state, first = CacheState(layers, recurrent, latent), None
    held: list[Any] = list(cache.layers)
    state.shared.windowed = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in held)
    for old, new in zip(held, state.every, strict=False):
        if isinstance(new, RecurrentLayer):
            if isinstance(old, LinearAttentionLayer):
                new.take(old)
            continue
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
            state.positions.offset = stored - lengths.to(old.keys.device)
        new.keys, new.values = in_attention_dtype(old.keys, old.values)
        new.dtype, new.device, new.bare_bytes = old.keys.dtype, old.device, bare_token_bytes(old.keys, old.values)
        new.is_initialized, new.seen, new.index = True, stored, first
        if (indexed := getattr(old, "indexer_keys", None)) is not None:
            new.update_indexer(indexed)
    _adopted(cache, state)
    return state
