"""Policies that drop nothing for good: at every decode step they choose which visual keys the upper layers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from mmaccel_kernels.chosen import ChosenKeys
from torch import Tensor

from ..core.budget import layer_at
from ..kv.layer import CompressedLayer
from ..kv.shared import Shared
from ..kv.sparse import Choices, LayerRead, SparseMemory, SparseRead
from ..method import KeyUnits, LayerAttention, Observed, Policy, ReadingPolicy, ReadStep


def note_prompt(shared: Shared, table: Tensor, count: Tensor) -> None:
    """Carry with the cache what a prompt adds: its ``table [B, n, 4]`` of places, and how many more visual keys are to be read,
    ``count [B]``."""
    shared.grid_table = table
    shared.sparse = SparseMemory(count if shared.sparse is None else shared.sparse.count + count)


def first_layer(policy: Policy, depth: int) -> int:
    """The first layer that reads some keys only; at least 1 where the attention of the layer below chooses them."""
    least = 0 if isinstance(policy, ReadingPolicy) else 1
    return min(max(least, layer_at(getattr(policy, "layer", 1), depth)), depth)


def sparse_read(
    policy: Policy, shared: Shared, layer: CompressedLayer, first: int, attention: LayerAttention
) -> SparseRead | None:
    """What the layers from ``first`` on read in this step, chosen by the attention of its one token in the ``layer`` below;
    what was attended to and chosen is carried to the next step. None, which is everything, where :func:`note_prompt`
    has left nothing with the cache."""
    if shared.grid_table is None or shared.sparse is None:
        return None
    device, heads = attention.query.device, attention.key.shape[1]
    paid = attention.attention(0, 1)[:, :, 0].unflatten(1, (heads, -1))
    index = layer.index.by_head.long()
    # heads that store the same keys have one index
    paid = paid.mean((1, 2))[:, None] if index.shape[1] == 1 else paid.mean(2) / heads
    table, end = shared.grid_table.to(device), shared.grid_table.shape[1]
    there = (index >= 0) & (index < end)
    at, shape = torch.where(there, index, end), (*index.shape[:2], end + 1)
    by_place = paid.new_zeros(shape).scatter_(2, at, paid).sum(1)[:, :end]
    stored = there.new_zeros(shape).scatter_(2, at, True).any(1)[:, :end]
    visual = (table[..., 0] >= 0) & stored
    memory = shared.sparse = shared.sparse.to(device)
    chosen = policy.recall(by_place, memory.paid, visual, memory.count, memory.chosen) & visual
    memory.paid, memory.chosen = by_place, chosen
    return SparseRead(first, chosen | ~visual)


def read_layer(
    policy: ReadingPolicy, layer: CompressedLayer, query: Tensor, keys: Tensor, scaling: float
) -> ChosenKeys | None:
    """What a ``layer`` reads for ``query [B, Hq, 1, D]`` of all its ``keys [B, Hkv, K, D]``; None, which is everything, where
    nothing is to be left out."""
    memory = layer.shared.sparse
    if memory is None or layer.shared.grid_table is None or (policy.window and memory.level is None):
        return None
    held = memory.layers.get(layer.number)
    if held is None or held.choices.index() is not layer.index:
        held = memory.layers[layer.number] = _looked_at(policy, layer, memory, keys, scaling)
    choices = held.choices
    if choices.everything:
        return None
    step = ReadStep(
        query[:, :, 0],
        keys,
        choices.units,
        choices.gone,
        held.summary,
        held.carried,
        choices.count,
        choices.most,
        choices.all_there,
        None if memory.level is None else memory.level.to(query.device),
        scaling,
    )
    picked, carried = policy.pick(step)
    memory.layers[layer.number] = LayerRead(choices, held.summary, carried)
    return choices.chosen(picked)


def prepare_reads(
    policy: ReadingPolicy, layers: Sequence[CompressedLayer], scaling: float, asked: Mapping[int, tuple[Tensor, Tensor]]
) -> None:
    """A prompt is over: what these layers choose from in the steps that follow. ``asked``: of every layer the last queries of
    the prompt ``[B, Hq, W, D]``, and which are no padding ``[B, W]`` bool, for policies with a ``window``."""
    observed: list[Observed] = []
    for layer in layers:
        memory, keys = layer.shared.sparse, layer.stored()[0]
        assert memory is not None
        held = memory.layers[layer.number] = _looked_at(policy, layer, memory, keys, scaling)
        if policy.window and held.summary:
            observed.append(Observed(*asked[layer.number], held.summary, held.choices.gone, scaling))
    if policy.window and layers:
        memory, table = layers[0].shared.sparse, layers[0].shared.grid_table
        assert memory is not None and table is not None
        size = (table[..., 0] >= 0).sum(1).clamp(min=1)
        share = (memory.count.to(size.device) / size).clamp(max=1)
        memory.level = policy.level(observed, share) if observed else torch.zeros_like(share)


def _looked_at(
    policy: ReadingPolicy, layer: CompressedLayer, memory: SparseMemory, keys: Tensor, scaling: float
) -> LayerRead:
    """What a layer chooses from, and what the policy makes of it; at the end of a prompt, or when it stores its keys otherwise
    than before."""
    choices = memory.choices(layer.index)
    if choices is None:
        table = layer.shared.grid_table
        assert table is not None
        visual, count = (x.to(keys.device) for x in (table[..., 0] >= 0, memory.count))
        choices = Choices.make(
            layer.index, visual, count, policy.unit, policy.wanted, policy.partial, policy.sinks, policy.recent
        )
    if choices.everything or not policy.summarises:
        return LayerRead(choices, {}, {})
    slots = choices.units
    at = slots.clamp(min=0).long().expand(-1, keys.shape[1], -1, -1)
    units = keys.gather(2, at.flatten(2)[..., None].expand(-1, -1, -1, keys.shape[-1])).unflatten(2, at.shape[2:])
    return LayerRead(choices, policy.summarise(KeyUnits(units, slots >= 0, scaling)), {})
