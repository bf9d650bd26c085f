"""One forward of the text model that mmaccel shapes, as data: a prompt with pictures, or its continuation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...core.layout import Layout, Units
from ...core.masks import true_last
from ...core.reduction import Reduction
from ...core.stats import Stats
from ...kv.cache import CacheState
from ...kv.forward_info import ForwardInfo, Phase
from ...kv.index import KeyIndex
from .plan import ModelPlan


@dataclass(frozen=True)
class StageResult:
    """The tokens that are left of a prompt behind one stage of the recipe.

    stage : which stage of the recipe.
    layer : the decoder layer at whose input it works; 0 before the language model.
    reduction : ``[B, S]``, over this stage and all before it.
    units, signals : the tokens that the method reduced, and their figures that it saw, ``[N, n]`` (sums over tower layers).
    """

    stage: int
    layer: int
    reduction: Reduction
    units: Units | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict)

    def scores(self) -> dict[str, Tensor]:
        """The figures by name at the places of the prompt, ``[B, S]`` float32 on the CPU; NaN where there was none."""
        if self.units is None:
            return {}
        scores = {}
        unit, slot = self.units.valid.nonzero(as_tuple=True)
        for name, figures in self.signals.items():
            scores[name] = torch.full(self.reduction.kept.shape, torch.nan)
            scores[name][self.units.row[unit], self.units.places[unit, slot]] = figures.float().cpu()[unit, slot]
        return scores


@dataclass
class PromptResult:
    """A prompt with pictures, and the tokens that are left of it.

    layout : where its pictures are. reduction : ``[B, S]`` on the CPU, over all stages that have worked.
    history : the same stage by stage.
    """

    layout: Layout
    reduction: Reduction
    history: list[StageResult] = field(default_factory=list)


@dataclass
class LayerArguments:
    """Arguments of the layers between two reductions, in place of the caller's.

    replaced : by name. rotated : cosines and sines of the tokens that are left, by kind of RoPE, where layers have several.
    """

    replaced: dict[str, Any]
    rotated: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class Forward:
    """One forward of the text model.

    state : of the cache, or None.
    incoming : the forward as the cache sees it; its layers are those of the cache.
    device : of the embeddings.
    arguments : those of the layers, by phase (see :class:`~mmaccel.kv.forward_info.ForwardInfo`).
    """

    plan: ModelPlan
    stats: Stats
    state: CacheState | None
    incoming: ForwardInfo
    device: torch.device
    arguments: list[LayerArguments] = field(default_factory=list, kw_only=True)

    @property
    def seen(self) -> int:
        """Tokens the cache has seen before."""
        return self.incoming.seen

    @property
    def length(self) -> int:
        """Tokens of this forward before any reduction."""
        return self.incoming.length

    @property
    def real(self) -> Tensor | None:
        """``[B, q]`` bool, which of the tokens that are left are no padding; None where none is."""
        _, phase = self.incoming.phases[-1]
        return phase.places >= 0 if phase.padded else None

    def layer_arguments(self, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of layer ``number`` of the language model for the tokens that are left, of those that the caller gave."""
        return {**given, **self.arguments[-1].replaced} if self.arguments else given

    def phase(self, layer: int) -> Phase:
        """The tokens that a layer of the cache sees."""
        return self.incoming.phase(layer)

    def index(self, layer: int) -> KeyIndex:
        """Index of the keys that a layer of the cache attends to."""
        if self.state is None:
            phase = self.phase(layer)
            return phase.shared_index(self.seen + self.length, phase.places.device)
        index, sparse = self.state.layers[layer].index, self.incoming.sparse(layer)
        return index if sparse is None else sparse.index(index)

    def measured(
        self, name: str, device: torch.device, layers: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """The time of a stage at a prompt; while decoding it is part of the step's, which has few launches to spare.

        layers : those that the work is done for, where all have their turn, some at a time. On a GPU the turn of the layer in
        the middle is timed, and counted for all, so that events do not grow with layers.
        """
        return nullcontext()


@dataclass(eq=False)
class Continuation(Forward):
    """New tokens without pictures behind a prompt that was reduced; all of them stay.

    ids : their token ids ``[B, S]``; None where the caller gave none.
    """

    ids: Tensor | None = None


@dataclass(eq=False)
class Prompt(Forward):
    """A prompt with pictures, and the tokens that are left of it so far.

    result : its layout, and the tokens that are left.
    ids : its token ids ``[B, S]`` on the CPU.
    bidirectional : which tokens attend to each other both ways, ``[B, S]`` long on the CPU, see
        :meth:`~mmaccel.families.base.Family.bidirectional_groups`; None where none sees later tokens.
    first_time : ``[B]`` bool on the CPU, rows without a picture in the cache before this prompt.
    """

    result: PromptResult
    ids: Tensor
    bidirectional: Tensor | None = None
    first_time: Tensor | None = None

    @property
    def layout(self) -> Layout:
        """Layout of its pictures."""
        return self.result.layout

    @property
    def total(self) -> Reduction:
        """``[B, S]`` on the CPU, the tokens that are left, over all stages that have worked."""
        return self.result.reduction

    def reduced(
        self,
        stage: int,
        layer: int,
        total: Reduction,
        units: Units | None = None,
        signals: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Note the tokens that a stage left over; see :class:`StageResult`."""
        self.result.reduction = total
        self.result.history.append(StageResult(stage, layer, total, units, signals or {}))

    def count_left(self, layer: int) -> None:
        """Note how many visual tokens the layers from ``layer`` on see."""
        counts = self.stats.layer_tokens
        counts[layer:] = [int((self.total.kept & self.layout.visual).sum())] * (len(counts) - layer)

    def kinds(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Masks ``[B, q]`` bool on the CPU of the visual tokens, and of the text, at the places ``chosen [B, q]`` (-1
        padding)."""
        real, visual = chosen >= 0, self.layout.visual.gather(1, chosen.clamp(min=0))
        return real & visual, real & ~visual

    def layer_arguments(self, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """The same with rotary positions of the layer's kind of RoPE."""
        own, kind = self.arguments[-1], self.plan.family.rope_kind(number)
        arguments = {**given, **own.replaced}
        embeddings = given.get("position_embeddings")
        # layers without RoPE have none
        if kind is not None and len(self.arguments) > 1 and embeddings is not None:
            # layers of every kind of RoPE are given those of all tokens that entered the language model
            if kind not in own.rotated:
                slots = self.slots(chosen_of(self.incoming.phases[0][1]))
                (at,) = to_device_packed(embeddings[0].device, slots.gather(1, self.chosen.clamp(min=0)))
                own.rotated[kind] = tuple(rows_at(x.expand(len(at), -1, -1), at) for x in embeddings)
            arguments["position_embeddings"] = own.rotated[kind]
        if number in self.plan.family.recurrent:
            arguments["attention_mask"] = self.real
        return arguments

    @cached_property
    def text_rows(self) -> Tensor | None:
        """``[B]`` bool on the CPU, the rows that have no picture in this prompt, to which nothing may happen that does not
        happen in a forward without pictures; None where all have some."""
        rows = ~self.layout.visual.any(1)
        return rows if bool(rows.any()) else None

    def measured(
        self, name: str, device: torch.device, layers: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """The time of a stage."""
        if layers is None or device.type != "cuda":
            return self.stats.clock.measure(name, device)
        depth = len(self.plan.family.attending)
        return self.stats.clock.measure(name, device, depth / len(layers)) if depth // 2 in layers else nullcontext()

    @property
    def chosen(self) -> Tensor:
        """``[B, q]`` long on the CPU: the places of the tokens that are left, -1 for padding in front."""
        return chosen_of(self.incoming.phases[-1][1])

    def compacted(self, kept: Tensor) -> tuple[Tensor, bool]:
        """Places that stay, left-padded: ``[B, widest]`` long with -1 for padding, and whether any is padding; on the CPU."""
        width = int(kept.sum(1).max())
        order = true_last(kept)[:, -width:] if width else kept.new_zeros(len(kept), 0).long()
        real = kept.gather(1, order)
        return order.masked_fill(~real, -1), not bool(real.all())

    def begin(self, first: int, chosen: Tensor, padded: bool, device: torch.device, **arguments: Any) -> None:
        """From layer ``first`` of the language model on the tokens at ``chosen [B, q]`` (places of this forward on the CPU, -1
        padding) are left."""
        places = torch.where(chosen < 0, -1, chosen + self.seen).to(torch.int32)
        phase = Phase(places.to(device, non_blocking=True), padded, chosen)
        if self.bidirectional is not None:
            before = self.bidirectional.new_full((len(chosen), self.seen), -1)
            phase.bidirectional_groups = torch.cat([before, self.bidirectional], dim=1).to(device, non_blocking=True)
        self.incoming.phases.append((self.plan.family.stored_from(first), phase))
        self.arguments.append(LayerArguments(arguments))

    def slots(self, chosen: Tensor) -> Tensor:
        """``[B, S]`` long: the slot of each place in ``chosen [B, q]``; meaningless for places that are gone."""
        slots = torch.zeros(len(chosen), self.length, dtype=torch.long)
        row, slot = (chosen >= 0).nonzero(as_tuple=True)
        slots[row, chosen[row, slot]] = slot
        return slots

    def entered(self, units: Units) -> Tensor:
        """Number of tokens of each unit that entered the language model, ``[N]`` long on the CPU."""
        chosen = chosen_of(self.incoming.phases[0][1])
        entered = torch.zeros(self.total.kept.shape, dtype=torch.bool)
        rows, slots = (chosen >= 0).nonzero(as_tuple=True)
        entered[rows, chosen[rows, slots]] = True
        return units.only(entered).valid.sum(1)


@dataclass(frozen=True, eq=False)
class Piece:
    """Some tokens of a forward, with which the text model runs alone; see :class:`.split_prefill.SplitPrefill`.

    forward : the same with these tokens only. chosen : ``[B, n]`` long on the CPU, their places in the whole forward, -1 for
    padding.
    begin, end : their slots among the tokens that are left. last : whether none follows.
    """

    forward: Forward
    chosen: Tensor
    begin: int
    end: int
    last: bool


def chosen_of(phase: Phase) -> Tensor:
    """Places of a prompt that a phase holds, ``[B, q]`` long on the CPU."""
    if phase.chosen is None:
        raise RuntimeError("the phase of a prompt knows which of its tokens are left")
    return phase.chosen


def to_device_packed(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy integers and masks from the CPU to a device, all as long, in one transfer that the host does not wait for."""
    flat = torch.cat([x.flatten().long() for x in tensors]).to(device, non_blocking=True)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def gathered(
    units: Units, hidden: Tensor, rows: Tensor, at: Tensor, *others: Tensor
) -> tuple[dict[str, Any], Tensor, Tensor, list[Tensor]]:
    """Fields of a :class:`~mmaccel.method.TokenBatch` of ``units`` in rows ``rows [N]`` of ``hidden [B, q, D]`` at slots
    ``at [N, n]``, on the device of ``hidden``; and there also rows, slots and ``others``."""
    rows, at, real, cells, grid, segment, tile, tiles, *others = to_device_packed(  # type: ignore[assignment]
        hidden.device,
        rows,
        at,
        units.valid,
        units.cells,
        units.grid,
        units.segment,
        units.tile,
        units.tiles,
        *others,
    )
    valid = real.bool()
    features = hidden[rows[:, None], at] * valid[..., None]
    fields = {"features": features, "valid": valid, "cells": cells, "grid": grid, "segment": segment, "tile": tile}
    return {**fields, "tiles": tiles}, rows, at, list(others)


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """``x [B, S, D]`` at ``at [B, q]``."""
    return x.gather(1, at.to(x.device)[..., None].expand(-1, -1, x.shape[-1]))
