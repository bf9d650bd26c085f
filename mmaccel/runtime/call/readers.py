"""Readers: how the attention of a layer reads keys and values. A forward has one, see :func:`reader_of`.

=================  =============================================================================================
reader             the forward
=================  =============================================================================================
read_static        a captured step, whose cache is pinned
read_observed      a look ahead, which stores nothing
read_stored        one that mmaccel shapes: dense, ragged, packed or chosen keys, see :func:`read_stored`
read_given         any other, such as a text-only call: the model's own keys and values
=================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from mmaccel_kernels.chosen import ChosenKeys, chosen_attention
from torch import Tensor, nn

from ...core.precision import in_attention_dtype, without_autocast
from ...families.latents import absorbed
from ...kv.decoding import attend, attend_behind, reads_as_stored
from ...kv.distance import distance_factor
from ...kv.head_groups import HeadStore
from ...kv.latent_layer import LatentLayer
from ...kv.packed import QuantisedLayer
from .attention_patch import BACKENDS, base_function
from .call import Call
from .forward import Forward
from .runs import KeysToRead, LayerAttended

Output = tuple[Tensor, Tensor | None]
#: so few queries are not read in two passes, of which each takes its time
FEW_QUERIES = 16


@dataclass
class Attention:
    """The attention of one layer as transformers asks for it.

    query : ``[B, Hq, q, D]``. key, value : ``[B, Hkv, K, D]``. mask : what ``base`` takes, None without one.
    scaling : the factor of ``q . k``; None for ``D ** -0.5``. options : other arguments of attention functions.
    window : how far back the layer's sliding window reaches; None without one. indices : ``[B, q, n]``, the keys among which
    each query attends to those that it may see, where an indexer has chosen them.
    """

    base: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    options: dict[str, Any]
    window: int | None
    indices: Tensor | None = None

    @property
    def picked(self) -> Tensor:
        """``[B, 1, q, K]`` bool, the keys of :attr:`indices`."""
        assert self.indices is not None
        mask = self.indices.new_zeros(*self.indices.shape[:2], self.key.shape[2], dtype=torch.bool)
        return mask.scatter_(2, self.indices.long(), True)[:, None]

    @property
    def scale(self) -> float:
        """The factor of ``q . k``."""
        return self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def unpack(self, layer: QuantisedLayer) -> None:
        """Take all that a layer stores as keys and values."""
        latent = isinstance(layer, LatentLayer)
        held = self.module.expand_kv(*layer.latents()) if latent else layer.stored()  # type: ignore[operator]
        self.query, self.key, self.value = in_attention_dtype(self.query, *held)

    def run(self, base: str, mask: Tensor | None, scaling: float | None) -> Output:
        """The output ``[B, q, Hq, D]`` of implementation ``base``, and its weights where it returns them."""
        function = base_function(base, self.module)
        return function(self.module, self.query, self.key, self.value, mask, scaling=scaling, **self.options)


def reader_of(call: Call[Any]) -> Callable[[Call[Any], int, Attention], Output]:
    """The reader of the forward that is being run."""
    if call.observer is not None:
        return read_observed
    if call.text.runs is not None:
        return read_stored
    return read_given if call.static_view is None else read_static


def read_given(call: Call[Any] | None, number: int | None, given: Attention) -> Output:
    """Keys and values as the model was given them."""
    mask = given.mask
    if given.indices is not None:
        assert mask is not None, "a layer with an indexer has a mask"
        least = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        mask = mask.masked_fill(~given.picked, least)
    return given.run(given.base, mask, given.scaling)


def read_static(call: Call[Any], number: int, given: Attention) -> Output:
    """The pinned keys of a captured step."""
    assert call.static_view is not None
    pinned = call.static_view.layers[number]
    pinned.note_query(given.query)
    if not pinned.masked:
        with without_autocast(given.query.device):
            return pinned.attend(given.query.to(pinned.keys.dtype), given.scale), None
    count, added = given.query.shape[2], pinned.cursor.added
    given.mask = pinned.cursor.seen_by(count) if added is None else added[:, :, :count]
    given.mask = None if given.mask is None else _for_heads(given.mask, given)
    return read_given(call, number, given)


def read_observed(call: Call[Any], number: int, given: Attention) -> Output:
    """The keys that the observer of a look ahead gives, or the model's own."""
    assert call.observer is not None
    seen = call.observer.attend(number, given.query, given.key, given.value, given.scale, given.window)
    if seen is None:
        return read_given(call, number, given)
    given.key, given.value, visible = seen
    mask = _for_heads(visible, given)
    if given.base == "eager":
        return given.run("eager", _added(mask, given.query.dtype), given.scaling)
    return given.run("sdpa", mask, given.scaling)


def read_stored(call: Call[Any], number: int, given: Attention) -> Output:
    """The stored keys, or those of them that a run chooses; runs see the layer when it has attended.

    =====================================  ====================================================================
    keys                                   read by
    =====================================  ====================================================================
    the run needed the whole attention     the run itself, in the pass in which it observes
    shared by rows                         :func:`mmaccel.kv.decoding.attend_behind`, once a batch
    in host memory, very many              the last of these, some heads at a time: :func:`_by_heads`
    ragged or packed, few new tokens, GPU  :func:`mmaccel.kv.decoding.attend`, as they are stored
    ragged, one new token, CPU             the same
    chosen, one new token                  :func:`mmaccel_kernels.chosen.chosen_attention`
    chosen, a piece of a prompt            SDPA over those keys alone: :func:`_read_gathered`
    all, more than a few new tokens, CPU   earlier keys without a mask: :func:`_read_behind`
    all others                             the model's own implementation, with a mask: :func:`_masked`
    =====================================  ====================================================================
    """
    runs = call.text.runs
    assert runs is not None
    observed = bool(runs.readers or runs.observers)
    layer, seen = _layer_attended(runs.forward, number, given, observed)
    keys = KeysToRead()
    if runs.readers:
        # over latents the model reads the keys and values that it made of them
        plain = given.base == "sdpa" and not _weighs(runs.forward) and not runs.forward.plan.family.latent
        seen.plain = plain and getattr(given.module, "is_causal", True)
        keys = runs.keys_to_read(seen) or keys
    if keys.grown and layer is not None:
        given.unpack(layer)
        layer, seen = _layer_attended(runs.forward, number, given, observed)
    chosen = keys.chosen
    heads = None if layer is None or layer.shared.host is None else _heads_at_once(runs.forward, layer, given)
    if heads is not None:
        assert layer is not None
        output: Output = _by_heads(runs.forward, number, given, seen, layer, heads), None
    elif keys.output is not None:
        output = keys.output, None
    elif layer is not None and seen.as_stored and layer.prefix is not None and chosen is None:
        windowed = layer.index.windowed(given.window)
        held, query = (layer.prefix, layer.keys, layer.values), given.query.to(layer.keys.dtype)
        output = attend_behind(*held, query, seen.visible, seen.scaling, windowed), None
    elif layer is not None and seen.as_stored and (chosen is None or keys.pages is not None):
        output = attend(layer, given.query.to(layer.keys.dtype), seen.visible, seen.scaling, pages=keys.pages), None
    else:
        if layer is not None and seen.as_stored:
            given.unpack(layer)
            seen.query, seen.key, seen.value = given.query, given.key, given.value
        if chosen is None or given.base == "eager" or runs.forward.plan.family.latent:
            output = _masked(runs.forward, number, given, seen, chosen)
        else:
            output = _read_chosen(runs.forward, number, given, seen, chosen)
    runs.attended += 1
    if runs.observers:
        runs.after_attention(seen)
    return output


def _heads_at_once(forward: Forward, layer: QuantisedLayer, given: Attention) -> int | None:
    """The number of heads that are read together; None where the whole layer is on the device, which it is fetched to where
    its attention is not one for every head alone."""
    heads = layer.heads_at_once
    if heads is None or given.key.data_ptr() != layer.keys.data_ptr():
        return None
    of_heads = any(given.options.get(name) is not None for name in ("position_bias", "s_aux"))
    if not of_heads and given.indices is None and given.base != "eager" and forward.incoming.merged is None:
        return heads
    assert layer.shared.host is not None
    layer.shared.host.fetch(layer)
    given.unpack(layer)
    return None


def _by_heads(
    forward: Forward, number: int, given: Attention, seen: LayerAttended, layer: QuantisedLayer, heads: int
) -> Tensor:
    """The output of the model's own implementation over all keys of a layer in host memory, so many heads at a time."""
    host, groups, outputs = layer.shared.host, given.query.shape[1] // given.key.shape[1], []
    assert isinstance(host, HeadStore)
    for part, key, value in host.by_heads(layer, heads):
        query = given.query[:, part.start * groups : part.stop * groups]
        own = replace(given, query=query, key=key, value=value, options=dict(given.options))
        outputs.append(_masked(forward, number, own, seen, None)[0])
        # no more than two groups are on the device
        del key, value, own
    return torch.cat(outputs, dim=2)


def _layer_attended(
    forward: Forward, number: int, given: Attention, observed: bool
) -> tuple[QuantisedLayer | None, LayerAttended]:
    """The layer of the cache that layer ``number`` of the language model reads, and its attention before any key is chosen,
    which runs look at if it is ``observed``: over latents with absorbed queries."""
    family = forward.plan.towers
    stored = family.stored_from(number)
    # a decode step is here once a layer, so that every call counts
    phase, index = forward.incoming.phase(stored), forward.index(stored)
    layer = forward.state.layers[stored] if forward.state is not None else None
    as_stored = False
    if layer is not None:
        layer.window = given.window
        if layer.shared.host is not None:
            # a layer that reads the keys of another finds them parked
            layer.fetch()
        as_stored = reads_as_stored(layer, forward.incoming, given.query)
        if as_stored and given.base == "eager":
            # eager attention returns its weights
            given.unpack(layer)
            as_stored = False
    visible, query = None, given.query
    # where keys are read as they are stored the newest token sees all of them, wherever heads end
    if layer is None or not as_stored or query.shape[2] > 1 or index.windowed(given.window) or not layer.gapless:
        groups = (
            phase.bidirectional_groups
            if phase.bidirectional_groups is not None and family.is_bidirectional(number)
            else None
        )
        visible = index.mask(phase.places, given.window, groups)
    if visible is not None:
        # layers may be spread over devices
        visible = visible.to(query.device, non_blocking=True)
    if given.indices is not None:
        visible = given.picked & visible_keys(forward, number, query.device)
    key, value = given.key, given.value
    if layer is not None and layer.latent and observed:
        key, value = in_attention_dtype(*layer.keys_and_values())
        if (sparse := forward.incoming.sparse(stored)) is not None:
            key, value = sparse.read(layer.index, key, value)
        query = absorbed(given.module, query, value)
    return layer, LayerAttended(stored, query, key, value, visible, given.scale, given.window, as_stored)


def visible_keys(forward: Forward, number: int, device: torch.device) -> Tensor:
    """``[B or 1, 1, q, K]`` bool: which stored keys of a layer without a window the queries of a forward may see."""
    stored = forward.plan.towers.stored_from(number)
    places, index = forward.incoming.phase(stored).places, forward.index(stored)
    mask = index.mask(places, None)
    if mask is None:
        # causal, and all keys are those of the queries, or the query is the newest
        mask = torch.ones(places.shape[1], len(index), dtype=torch.bool).tril(len(index) - places.shape[1])[None, None]
    return mask.to(device, non_blocking=True)


def _read_chosen(forward: Forward, number: int, given: Attention, seen: LayerAttended, chosen: ChosenKeys) -> Output:
    """The output over the keys that a run has chosen."""
    if given.query.shape[2] > 1:
        return (
            _masked(forward, number, given, seen, chosen) if _weighs(forward) else _read_gathered(given, seen, chosen)
        )
    read, _ = chosen_attention(given.query, given.key, given.value, chosen, scaling=seen.scaling, visible=seen.visible)
    return read.transpose(1, 2), None


def _read_gathered(given: Attention, seen: LayerAttended, chosen: ChosenKeys) -> Output:
    """The same for several queries."""
    (_, heads, total, width), new = given.key.shape, given.query.shape[2]
    slots = chosen.slots(total).long()
    there, at = slots >= 0, slots.clamp(min=0)
    if seen.visible is None:
        # the newest keys are those of the queries
        own = torch.arange(new, device=at.device)[:, None]
        mask = there[:, :, None] & (at[:, :, None] - (total - new) <= own)
    else:
        shape = max(len(seen.visible), len(at)), max(seen.visible.shape[1], at.shape[1]), new, at.shape[2]
        of_all = seen.visible.expand(*shape[:3], -1)
        mask = there[:, :, None] & of_all.gather(3, at[:, :, None].expand(shape))
    places = at.expand(-1, heads, -1)[..., None]
    given.key = given.key.gather(2, places.expand(-1, -1, -1, width))
    given.value = given.value.gather(2, places.expand(-1, -1, -1, given.value.shape[3]))
    return given.run("sdpa", _for_heads(mask, given), seen.scaling)


def _masked(forward: Forward, number: int, given: Attention, seen: LayerAttended, chosen: ChosenKeys | None) -> Output:
    """The output of the model's own implementation over all stored keys; eager attention reads ``chosen`` keys by a mask."""
    visible, base = seen.visible, given.base
    if chosen is not None:
        mask = chosen.mask(given.key.shape[2])
        visible = mask if visible is None else mask & visible
    # as :func:`_weighs`, without a call in every layer of every step
    incoming = forward.incoming
    if incoming.weights is not None or incoming.merged is not None:
        # flash attention takes nothing that is added to its logits
        base = "eager" if base == "eager" else "sdpa"
        return given.run(base, _weighed(forward, given, seen.number, visible), seen.scaling)
    if base not in BACKENDS:
        base, padding = _for_flash(forward, number, given, seen)
        return given.run(base, padding, seen.scaling)
    if visible is None and base == "eager" and given.query.shape[2] > 1:
        # eager attention is causal by its mask alone; without one all keys are those of the queries
        shape = given.query.shape[2], given.key.shape[2]
        visible = torch.ones(*shape, dtype=torch.bool, device=given.query.device).tril()[None, None]
    if visible is None:
        return given.run(base, None, seen.scaling)
    several = given.query.shape[2] > FEW_QUERIES
    if several and base == "sdpa" and chosen is None and _sees_all_before(forward, number, given, seen):
        return _read_behind(given, seen.scaling)
    mask = _for_heads(visible, given)
    return given.run(base, _added(mask, given.query.dtype) if base == "eager" else mask, seen.scaling)


def _sees_all_before(forward: Forward, number: int, given: Attention, seen: LayerAttended) -> bool:
    """Whether :func:`_read_behind` gives the output: on a CPU each query sees all keys before those of the queries, and of
    these all up to its own; the attention is plain and needs no gradient."""
    phase, index, options = forward.phase(seen.number), forward.index(seen.number), given.options
    ahead = phase.bidirectional_groups is not None and forward.plan.family.is_bidirectional(number)
    hidden = index.padded or phase.padded or ahead or phase.back is not None or index.windowed(given.window)
    more = options.get("dropout") or any(options.get(name) is not None for name in ("position_bias", "softcap"))
    return (
        not hidden
        and not more
        and not forward.incoming.reads
        and not torch.is_grad_enabled()
        and given.query.device.type == "cpu"
        and given.query.shape[2] < given.key.shape[2] == len(index)
        and given.key.shape == given.value.shape
    )


def _read_behind(given: Attention, scaling: float) -> Output:
    """The output over the keys before those of the queries, without a mask, and over their own, causally, as one by their
    logarithms of the sum of exponentials: with a mask a CPU reads long caches far slower."""
    query, (rows, heads, new, width) = given.query, given.query.shape
    before, shared = given.key.shape[2] - new, given.key.shape[1]
    groups = heads // shared
    # the public function returns no logarithms
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # without a mask, query heads that share keys are so many more queries
    several = query.reshape(rows, shared, groups * new, width)
    read, lse = attention(several, given.key[:, :, :before], given.value[:, :, :before], scale=scaling)
    key, value = (x[:, :, before:].repeat_interleave(groups, dim=1) for x in (given.key, given.value))
    own, own_lse = attention(query, key, value, is_causal=True, scale=scaling)
    read, lse = (x.to(lse.dtype).unflatten(2, (groups, new)) for x in (read, lse))
    own, own_lse = (x.to(lse.dtype).unflatten(1, (shared, groups)) for x in (own, own_lse))
    both = own.lerp_(read, torch.sigmoid(lse - own_lse)[..., None])
    return both.flatten(1, 2).to(query.dtype).transpose(1, 2), None


def _weighs(forward: Forward) -> bool:
    """Whether some keys weigh more than others in this forward."""
    return forward.incoming.weights is not None or forward.incoming.merged is not None


def _weighed(forward: Forward, given: Attention, number: int, visible: Tensor | None) -> Tensor:
    """The mask ``[B, 1 or Hq, 1 or q, K]`` of numbers by which some keys of a layer weigh more, and others are not
    ``visible``."""
    incoming, index, query = forward.incoming, forward.index(number), given.query
    if incoming.merged is not None:
        return incoming.merged.mask(number, index, query, visible)
    assert incoming.weights is not None
    first = incoming.first_weights if not number else None
    added = index.weighed(incoming.weights if first is None else first, visible, query.shape[2])
    if incoming.by_distance:
        places, end = incoming.phase(number).places.to(added.device), incoming.seen + incoming.length
        added = added + distance_factor(places, index.by_head, end)
    return _for_heads(added, given).to(query.dtype)


def _for_flash(forward: Forward, number: int, given: Attention, seen: LayerAttended) -> tuple[str, Tensor | None]:
    """The implementation and its mask in place of flash attention, which aligns causal masks to the lower right and takes
    padding as ``[B, K]``: enough unless heads store different keys, a window would count stored instead of original places,
    or tokens look ahead or come back."""
    given.options.pop("position_ids", None)
    query, phase, index = given.query, forward.phase(seen.number), forward.index(seen.number)
    if query.shape[2] < given.key.shape[2]:
        # tokens behind a prompt are causal, even if the prompt is not and its modules say so
        given.options["is_causal"] = True
    if seen.visible is None:
        return given.base, None
    ahead = phase.bidirectional_groups is not None and forward.plan.family.is_bidirectional(number)
    # keys that are picked out are padded behind the last ones, which flash attention takes for those of the queries
    picked = query.shape[2] > 1 and forward.incoming.sparse(seen.number) is not None
    if index.of_heads or index.windowed(given.window) or ahead or phase.back is not None or picked:
        return "sdpa", _for_heads(seen.visible, given)
    return given.base, (index.index >= 0).to(query.device, non_blocking=True) if index.padded else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean ``mask`` as numbers that eager attention adds to its logits."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _for_heads(mask: Tensor, given: Attention) -> Tensor:
    """``[B, 1 or Hkv, q, K]`` for query heads."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(given.query.shape[1] // given.key.shape[1], dim=1)
