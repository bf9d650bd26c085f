"""Sparse reads: the keys that a decode step reads, and the choices of each layer; the runs are in :mod:`.reading`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import torch
from mmaccel_kernels.chosen import ChosenKeys, chosen_attention
from mmaccel_kernels.pages import Pages
from torch import Tensor
from torch.nn.functional import pad

from ...core.budget import layer_at
from ...kv.decoding import attend
from ...kv.index import KeyIndex
from ...kv.layer import CompressedLayer
from ...kv.listing import Listing
from ...kv.packed import QuantisedLayer
from ...kv.shared import Shared
from ...kv.sparse import Candidates, Choices, LayerRead, SparseMemory, SparseRead
from ...kv.static_view import StaticLayerView
from ...method import KeyUnits, LayerAttention, Observed, Picked, Policy, ReadingPolicy, ReadStep, results
from ...method.refused import described, refuse
from ...method.results import check_rows, check_slots, check_tensor, check_type, check_within

#: entries of keys that are looked at together at the end of a prompt: layers of a short one at once, of a long one alone
TOGETHER = 1 << 24
#: columns of a table of places that tell groups of visual keys apart
_AXES = {"picture": 1, "frame": 2, "row": 3}


def note_prompt(shared: Shared, table: Tensor, count: Tensor, text_rows: Tensor | None = None) -> None:
    """Store with the cache a prompt's ``table [B, n, 4]`` of places, and the number of visual keys that it adds to the budget,
    ``count [B]``. The ``text_rows [B]`` bool on the CPU, or None, have no picture in it and keep their state."""
    shared.places.grid_table, before = table, shared.memory(SparseMemory)
    if before is None:
        shared.keep(SparseMemory(count))
        return
    memory = shared.keep(SparseMemory(before.count + count, level=before.level, noted=before.noted))
    if text_rows is not None and before.paid is not None and before.chosen is not None:
        new, behind = ~text_rows.to(before.paid.device)[:, None], (0, table.shape[1] - before.paid.shape[1])
        # like no attention there may be, so that these rows choose anew
        memory.paid = pad(before.paid, behind).masked_fill(new, torch.nan)
        memory.chosen = pad(before.chosen, behind)


def first_layer(policy: Policy, depth: int) -> int:
    """The first layer that reads some keys only; at least 1 where the layer below chooses them."""
    least = int(policy.recalls and (not policy.chooses_by_layer or cast(ReadingPolicy, policy).ahead))
    return min(max(least, layer_at(getattr(policy, "layer", 1), depth)), depth)


def sparse_read(policy: Policy, shared: Shared, layer: CompressedLayer, attention: LayerAttention) -> SparseRead | None:
    """Sparse read of the layers above in this step, chosen by the attention of its one token in the ``layer`` below;
    its attention and its choice are carried to the next step. None, which is everything, where :func:`note_prompt`
    has left nothing with the cache."""
    table, memory = shared.places.grid_table, shared.memory(SparseMemory)
    if table is None or memory is None:
        return None
    device, heads = attention.query.device, attention.key.shape[1]
    if policy.sees_logits:
        return _by_logits(policy, table.to(device), memory, layer, attention)
    paid = attention.attention(0, 1)[:, :, 0].unflatten(1, (heads, -1))
    index = layer.index.by_head.long()
    # heads that store the same keys have one index
    paid = paid.mean((1, 2))[:, None] if index.shape[1] == 1 else paid.mean(2) / heads
    at, visual = _stored_visual(index, table.to(device))
    end = visual.shape[1]
    by_place = paid.new_zeros(*at.shape[:2], end + 1).scatter_(2, at, paid).sum(1)[:, :end]
    memory.move(device)
    chosen = policy.recall(by_place, memory.paid, visual, memory.count, memory.chosen)
    chosen = check_tensor(policy, "recall()", chosen, "bool", visual.shape, visual) & visual
    memory.paid, memory.chosen = by_place, chosen
    # heads that store different keys share no count
    if policy.steady and index.shape[1] == 1 and memory.left_out is None:
        memory.left_out = (visual & ~chosen).sum(1).tolist()
    return SparseRead(chosen | ~visual, layer.index, memory.left_out)


def _by_logits(
    policy: Policy, table: Tensor, memory: SparseMemory, layer: CompressedLayer, attention: LayerAttention
) -> SparseRead:
    """The same, chosen by the logits of its one token."""
    logits = attention.logits(0, 1)[:, :, 0]
    rows, heads, _ = logits.shape
    index = layer.index.by_head.long()
    own = index.repeat_interleave(heads // index.shape[1], dim=1)
    by_place = logits.new_full((rows, heads, layer.seen + 1), -torch.inf)
    # what is no key goes to a place behind the last
    by_place = by_place.scatter(2, torch.where(own >= 0, own, layer.seen), logits)[..., : layer.seen]
    _, visual = _stored_visual(index, table)
    memory.move(index.device)
    chosen = policy.recall_by_logits(by_place, visual, memory.count)
    chosen = check_tensor(policy, "recall_by_logits()", chosen, "bool", visual.shape, visual) & visual
    memory.chosen = chosen
    return SparseRead(chosen | ~visual, layer.index, None)


def _stored_visual(index: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The places ``[B, heads, K]`` long of an ``index [B, heads, K]`` long in a ``table [B, n, 4]``, ``n`` for all others; and
    ``[B, n]`` bool, the places of visual tokens that some head stores."""
    end = table.shape[1]
    at = torch.where((index >= 0) & (index < end), index, end)
    stored = torch.zeros(*at.shape[:2], end + 1, dtype=torch.bool, device=at.device).scatter_(2, at, True)
    return at, (table[..., 0] >= 0) & stored.any(1)[:, :end]


def read_layer(
    policy: ReadingPolicy, layer: QuantisedLayer, query: Tensor, keys: Tensor | None, scaling: float
) -> ChosenKeys | None:
    """Keys that a ``layer`` reads for ``query [B, Hq, 1, D]`` of all its ``keys [B, Hkv, K, D]``; None, which is everything,
    where nothing is to be left out. Where ``keys`` are None packed ones are decoded only if they are needed."""
    memory = layer.shared.memory(SparseMemory)
    if memory is None or layer.shared.places.grid_table is None or (policy.window and memory.level is None):
        return None
    held = memory.layers.get(layer.number)
    if held is None or held.choices.index() is not layer.index:
        keys = layer.keys_and_values()[0] if keys is None else keys
        (held,) = _looked_at(policy, [layer], memory, [keys], scaling)
        memory.layers[layer.number] = held
    if held.choices.everything:
        return None
    level = None if memory.level is None else memory.level.to(query.device)
    total = None if keys is None else keys.shape[2]
    chosen, carried = choose(policy, held, level, query, layer.keys if keys is None else keys, scaling, total)
    if carried or held.carried:
        memory.layers[layer.number] = replace(held, carried=carried)
    return chosen


def choose(
    policy: ReadingPolicy,
    held: LayerRead,
    level: Tensor | None,
    query: Tensor,
    keys: Tensor,
    scaling: float,
    total: int | None = None,
) -> tuple[ChosenKeys, Mapping[str, Tensor]]:
    """The keys that a step reads by ``query [B, Hq, 1, D]``, of ``total`` slots where the host knows them, and the tensors
    carried to the next one."""
    choices = held.choices
    step = ReadStep(
        query[:, :, 0],
        keys,
        choices.rated,
        choices.gone,
        held.summary,
        held.carried,
        choices.each,
        choices.count,
        choices.most,
        choices.all_there,
        choices.even,
        level,
        scaling,
    )
    returned: Any = policy.pick(step)
    if not isinstance(returned, tuple) or len(returned) != 2:
        refuse(policy, "pick()", described(returned), "a tuple of a Picked and a dict of tensors")
    picked, carried = returned
    # the base picks by ratings that it has checked
    if type(policy).pick is not ReadingPolicy.pick:
        check_type(policy, "pick()", picked, Picked)
        units = check_tensor(policy, "pick() (`units`)", picked.units, "int32", (query.shape[0], None, None), query)
        check_tensor(policy, "pick() (`counts`)", picked.counts, "int32", units.shape[:2], query)
        _check_picked(policy, picked, choices.gone.shape[2] // choices.each)
        for name, x in check_type(policy, "pick() (`carried`)", carried, dict).items():
            check_rows(policy, f"pick() ({name!r})", x, len(units), query)
        total = None
    return choices.chosen(picked, total if query.device.type == "cpu" else None), carried


def _check_picked(policy: ReadingPolicy, picked: Picked, count: int) -> None:
    """Validate on the CPU the units that were picked of ``count``: ascending, each once. Behind them ``count`` is a filler."""
    units, counts = picked
    if not results.on_host(units):
        return
    check_within(policy, "pick() (`counts`)", counts, 0, torch.tensor(units.shape[2]))
    check_slots(policy, "pick() (`units`)", units, count + 1)
    used = torch.arange(units.shape[2]) < counts[..., None]
    check_slots(policy, "pick() (`units`)", units.masked_fill(~used, 0), count)
    if not bool(((units.diff(dim=-1) > 0) | ~used[..., 1:]).all()):
        refuse(policy, "pick() (`units`)", "units out of order or more than once", "ascending units, each once")


def _wanted(policy: ReadingPolicy, count: Tensor, there: Tensor) -> Tensor:
    """Number of units that ``policy.wanted`` returns, validated."""
    units = check_tensor(policy, "wanted()", policy.wanted(count, there), "integer", there.shape, there)
    return check_within(policy, "wanted()", units, 0, there)


def packed_read(layer: QuantisedLayer, chosen: ChosenKeys) -> Pages | None:
    """The packed pages of a ``layer`` that a step reads, of the keys ``chosen``; None where keys are not chosen
    by packed pages."""
    memory, pages = layer.shared.memory(SparseMemory), layer.pages
    assert memory is not None
    held = memory.layers[layer.number]
    if held.choices.pages is None or pages is None:
        return None
    held = memory.layers[layer.number] = _listed(held, pages)
    assert held.listed is not None
    return held.listed.read(pages, chosen.picked, chosen.counts)


def note_read(layer: QuantisedLayer, chosen: ChosenKeys, summarises: bool) -> None:
    """Count the bytes of the ``chosen`` keys of a parked layer, at most, and of all its keys unless a summary is rated."""
    host, (rows, heads, _, width) = layer.shared.host, layer.keys.shape
    assert host is not None
    keys = chosen.always.shape[2] + len(layer.index) - chosen.stored + chosen.picked.shape[2] * chosen.units.shape[3]
    every = 0 if summarises else len(layer.index) * width
    host.moved.read += rows * heads * (keys * (width + layer.values.shape[3]) + every) * layer.keys.element_size()


def _listed(held: LayerRead, pages: Pages) -> LayerRead:
    """The same, which knows how ``pages`` are listed where they are chosen."""
    choices = held.choices
    if held.listed is not None or choices.pages is None:
        return held
    count = None if choices.fewer else choices.count
    return replace(held, listed=Listing.make(pages, choices.pages, choices.most, count))


@dataclass(frozen=True, eq=False)
class PinnedRead:
    """Sparse reads of a pinned layer, whose tensors stay where they are.

    held : its choices, whose ``carried`` tensors are overwritten at every step. level : see :class:`ReadStep`.
    pages : those of the layer, if it has some.
    """

    policy: ReadingPolicy
    held: LayerRead
    level: Tensor | None
    pages: Pages | None

    def attend(self, layer: StaticLayerView, query: Tensor, scaling: float) -> Tensor:
        """Attention of ``query [B, Hq, 1, D]`` over the keys that it chooses, ``[B, 1, Hq, D]``."""
        chosen, carried = choose(self.policy, self.held, self.level, query, layer.keys, scaling)
        for name, x in carried.items():
            self.held.carried[name].copy_(x)
        cursor = layer.cursor
        if self.held.listed is not None and self.pages is not None:
            pages = self.held.listed.read(self.pages, chosen.picked, chosen.counts)
            return attend(layer, query, None, scaling, cursor.filled, pages)
        seen = None if cursor.visible is None else cursor.visible.expand(len(query), -1, -1, -1)
        read, _ = chosen_attention(
            query, layer.keys, layer.values, chosen, scaling=scaling, visible=seen, tail=cursor.filled
        )
        return read.transpose(1, 2)

    def tensors(self) -> Iterator[Tensor]:
        """Everything held, beside the pages, which are the layer's."""
        yield from self.held.tensors()
        if self.level is not None:
            yield self.level

    def carried(self) -> Iterator[Tensor]:
        """Tensors that every token changes."""
        yield from self.held.carried.values()


def pinned_reads(policy: ReadingPolicy, layers: Sequence[QuantisedLayer]) -> dict[int, PinnedRead] | None:
    """Sparse reads of pinned layers, by their numbers; None where an ordinary step must prepare the choices first."""
    memory, reads = layers[0].shared.memory(SparseMemory), {}
    if memory is None or layers[0].shared.places.grid_table is None or (policy.window and memory.level is None):
        return {}
    for layer in layers[first_layer(policy, len(layers)) :]:
        held = memory.layers.get(layer.number)
        if held is None or held.choices.index() is not layer.index:
            return None
        if held.choices.everything:
            continue
        if layer.pages is not None:
            held = _listed(held, layer.pages)
        # somebody else may hold the carried tensors
        held = replace(held, carried={name: x.clone() for name, x in held.carried.items()})
        memory.layers[layer.number] = held
        level = None if memory.level is None else memory.level.to(layer.keys.device)
        reads[layer.number] = PinnedRead(policy, held, level, layer.pages)
    return reads


def unpinnable(policy: ReadingPolicy, layers: Sequence[QuantisedLayer]) -> str:
    """Reason why steps cannot choose the keys that they read of these layers while they are pinned; empty if they can."""
    if policy.ahead:
        return f"{policy.name} chooses by the input of the layer before"
    return next(filter(None, (_copies(policy, layer) for layer in layers[first_layer(policy, len(layers)) :])), "")


def _copies(policy: Policy, layer: QuantisedLayer) -> str:
    """Why all keys of a layer are copied before some are read; empty if they are read where they are."""
    if layer.prefix is not None:
        return f"{policy.name} chooses from keys that rows share"
    if layer.ragged is not None:
        return f"{policy.name} chooses from heads that store different counts"
    by_page = policy.chooses_by_layer and cast(ReadingPolicy, policy).summarises
    whole = by_page and layer.packed.only is not None and layer.gapless and layer.window is None
    if layer.packed.any_pages and not whole:
        return f"{policy.name} decodes packed keys at every step before it reads them"
    return ""


def chosen_layers(policy: Policy, layers: Sequence[QuantisedLayer]) -> frozenset[int]:
    """The layers of which a step reads chosen keys, without copying the others."""
    shared = layers[0].shared
    memory = shared.memory(SparseMemory)
    if not policy.recalls or memory is None or shared.places.grid_table is None:
        return frozenset()
    above = layers[first_layer(policy, len(layers)) :]
    chosen = set()
    for layer in above:
        if policy.chooses_by_layer:
            held = memory.layers.get(layer.number)
            known = held is not None and held.choices.index() is layer.index and not held.choices.everything
        else:
            known = True
        if known and not _copies(policy, layer):
            chosen.add(layer.number)
    return frozenset(chosen)


def prepare_reads(
    policy: ReadingPolicy,
    layers: Sequence[QuantisedLayer],
    scaling: float,
    asked: Mapping[int, tuple[Tensor, Tensor]],
    text_rows: Tensor | None = None,
) -> None:
    """Prepare, behind a prompt, the choices of these layers in the steps that follow.

    asked : of every layer the last queries of the prompt ``[B, Hq, W, D]``, and which are no padding ``[B, W]`` bool, for
        policies with a ``window`` or that note queries.
    text_rows : see :func:`note_prompt`.
    """
    observed: list[Observed] = []
    if policy.noted:
        for layer in layers:
            _note_queries(policy, layer, *asked[layer.number], text_rows)
    for group in _same_choices(layers):
        memory = group[0].shared.memory(SparseMemory)
        assert memory is not None
        looked = _looked_at(policy, group, memory, (layer.keys_and_values()[0] for layer in group), scaling)
        for layer, held in zip(group, looked, strict=True):
            memory.layers[layer.number] = held
            if policy.window and held.summary:
                observed.append(Observed(*asked[layer.number], held.summary, held.choices.gone, scaling))
    if policy.window and layers:
        memory, table = layers[0].shared.memory(SparseMemory), layers[0].shared.places.grid_table
        assert memory is not None and table is not None
        size = (table[..., 0] >= 0).sum(1).clamp(min=1)
        share = (memory.count.to(size.device) / size).clamp(max=1)
        shape = share.shape if policy.thresholds == 1 else (len(share), policy.thresholds)
        level = policy.level(observed, share) if observed else share.new_zeros(shape)
        level, before = check_tensor(policy, "level()", level, "float", shape, share), memory.level
        if before is not None and text_rows is not None:
            kept = text_rows.to(level.device).view(-1, *[1] * (level.dim() - 1))
            level = torch.where(kept, before.to(level), level)
        memory.level = level


def _note_queries(
    policy: ReadingPolicy, layer: QuantisedLayer, queries: Tensor, seen: Tensor, text_rows: Tensor | None
) -> None:
    """Keep a summary of the last queries of a layer's prompt; ``text_rows`` keep that of an earlier one."""
    memory = layer.shared.memory(SparseMemory)
    assert memory is not None
    noted = check_rows(policy, "note_queries()", policy.note_queries(queries, seen), len(queries), queries)
    before = memory.noted.get(layer.number)
    if before is not None and text_rows is not None:
        old = text_rows.to(noted.device).view(-1, *[1] * (noted.dim() - 1))
        noted = torch.where(old, before.to(noted), noted)
    memory.noted[layer.number] = noted


def _same_choices(layers: Sequence[QuantisedLayer]) -> Iterator[list[QuantisedLayer]]:
    """Layers in their order, as many together as choose from the same places on one device, up to :data:`TOGETHER` entries of
    keys."""

    def kind(layer: QuantisedLayer) -> tuple[int, torch.device, torch.Size, torch.Size | None]:
        memory = layer.shared.memory(SparseMemory)
        # layers may have different numbers of query heads
        noted = None if memory is None else memory.noted.get(layer.number)
        return id(layer.index), layer.keys.device, layer.keys.shape, None if noted is None else noted.shape

    for _, same in groupby(layers, kind):
        group = list(same)
        rows, heads, _, width = group[0].keys.shape
        number = max(1, TOGETHER // max(1, rows * heads * width * len(group[0].index)))
        yield from (group[first : first + number] for first in range(0, len(group), number))


def _looked_at(
    policy: ReadingPolicy,
    layers: Sequence[QuantisedLayer],
    memory: SparseMemory,
    keys: Iterable[Tensor],
    scaling: float,
) -> list[LayerRead]:
    """The choices of layers with the :func:`_same_choices`, and the policy's summary of the ``keys`` of each; at the end of a
    prompt, or when a layer's stored keys have changed."""
    layer, number = layers[0], len(layers)
    choices = memory.choices(layer.index)
    if choices is None:
        table = layer.shared.places.grid_table
        assert table is not None
        visual, count = (x.to(layer.keys.device) for x in (table[..., 0] >= 0, memory.count))
        cells = None
        if policy.groups_by is not None:
            cells = table[..., : _AXES[policy.groups_by]].to(layer.keys.device)
        if policy.summarises and (pages := layer.packed.only) is not None:
            candidates = Candidates.make(layer.index, visual, count, policy.sinks, policy.recent, cells)
            most = functools.partial(_wanted, policy) if policy.partial else None
            choices = Choices.of_pages(layer.index, candidates, policy.unit, pages, layer.width, most)
        else:
            choices = single_keys(policy, layer.index, visual, count, cells)
    if choices.everything or not policy.summarises:
        return [LayerRead(choices, {}, {}) for _ in layers]
    units = [_at(choices.rated, stored) for stored in keys]
    # as if they were rows
    real = (choices.rated >= 0).repeat(number, 1, 1, 1)
    noted = [memory.noted[layer.number] for layer in layers if layer.number in memory.noted]
    shown = torch.cat(units) if number > 1 else units[0]
    group = None if choices.group is None else choices.group.repeat(number, 1, 1)
    asked = torch.cat(noted) if noted else None
    summary = policy.summarise(KeyUnits(shown, real, scaling, asked, group, choices.groups))
    for name, x in check_type(policy, "summarise()", summary, dict).items():
        check_rows(policy, f"summarise() ({name!r})", x, len(real), real)
    parts = {name: x.chunk(number) for name, x in summary.items()}
    return [LayerRead(choices, {name: x[n] for name, x in parts.items()}, {}) for n in range(number)]


def single_keys(
    policy: ReadingPolicy, index: KeyIndex, visual: Tensor, count: Tensor, cells: Tensor | None = None
) -> Choices:
    """The keys of an ``index`` that a policy chooses from, see :meth:`mmaccel.kv.sparse.Candidates.make`."""
    candidates = Candidates.make(index, visual, count, policy.sinks, policy.recent, cells)
    return Choices.make(index, candidates, policy.unit, functools.partial(_wanted, policy), policy.partial)


def _at(slots: Tensor, keys: Tensor) -> Tensor:
    """``keys [B, Hkv, K, D]`` at ``slots [B, 1 or Hkv, P, unit]``: ``[B, Hkv, P, unit, D]``."""
    at = slots.clamp(min=0).long().expand(-1, keys.shape[1], -1, -1)
    return keys.gather(2, at.flatten(2)[..., None].expand(-1, -1, -1, keys.shape[-1])).unflatten(2, at.shape[2:])
