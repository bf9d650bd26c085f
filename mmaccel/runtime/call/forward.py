"""One forward of the text model that mmaccel shapes, as data: a prompt with pictures, or what goes on behind one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...core.chunks import Chunks
from ...core.layout import Layout, Modality, Units
from ...core.masks import true_last
from ...core.reduction import Reduction, Residual
from ...core.stats import Stats
from ...kv.cache import CacheState
from ...kv.incoming import Incoming, Phase
from ...kv.index import KeyIndex
from ...kv.returning import Aside
from ...method import ChunkMethod, LayerAttention
from ...method.results import check_figures
from .plan import ModelPlan, PlannedStage
from .vision_output import Encoded


@dataclass(frozen=True)
class StageResult:
    """What is left of a prompt with pictures behind one stage of the recipe.

    stage : which stage of the recipe.
    layer : the decoder layer at whose input it works; 0 before the language model.
    reduction : ``[B, S]``, over this stage and all before it.
    units, signals : what the method reduced, and the figures per token that it was shown, ``[N, n]`` (sums over tower layers).
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
        found = {}
        unit, slot = self.units.valid.nonzero(as_tuple=True)
        for name, figures in self.signals.items():
            found[name] = torch.full(self.reduction.kept.shape, torch.nan)
            found[name][self.units.row[unit], self.units.places[unit, slot]] = figures.float().cpu()[unit, slot]
        return found


@dataclass(eq=False)
class Forward:
    """One forward of the text model.

    state : of the cache, if there is one.
    incoming : what the cache is told of this forward; its layers are those of the cache.
    device : of the embeddings.
    """

    plan: ModelPlan
    stats: Stats
    state: CacheState | None
    incoming: Incoming
    device: torch.device

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

    def phase(self, layer: int) -> Phase:
        """The tokens that a layer of the cache sees."""
        return self.incoming.phase(layer)

    def index(self, layer: int) -> KeyIndex:
        """Where the keys that a layer of the cache attends to came from."""
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

    returns : whether tokens of the prompt may come back.
    figures, among : by place what a method made of the attention of the last layer that was looked at, ``[B, n]`` each, and
        which of these places are visual tokens that it has seen, ``[B, n]`` bool.
    back : the tokens that run beside the new ones. arguments : those of the layers while they do, which replace the caller's.
    """

    returns: bool = False
    figures: dict[str, Tensor] = field(default_factory=dict)
    among: Tensor | None = None
    back: Aside | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Chunked:
    """The chunks of a prompt, as far as they have joined.

    stage : the method and its budget.
    now : the chunks that there are.
    joins : for every row of the prompt the layers at whose input its chunks join.
    positions : ``[R, q]``, where their tokens stand, on the first axis where there are several.
    count : ``[N]`` long on the CPU, how many tokens of every picture are to be left.
    looked : figures of their tokens that the method made of the attention before the next join, ``[R, q]``.
    """

    stage: PlannedStage[ChunkMethod]
    now: Chunks
    joins: list[list[int]]
    positions: Tensor
    count: Tensor
    looked: dict[str, Tensor] = field(default_factory=dict)

    def joining(self, layer: int) -> Tensor:
        """``[B]`` bool, the rows of the prompt whose chunks join at the input of a layer."""
        return torch.tensor([layer in layers for layers in self.joins])

    def due(self, layer: int) -> bool:
        """Whether chunks of any row do."""
        return any(layer in layers for layers in self.joins)

    def look(self, layer: int, attention: LayerAttention) -> None:
        """Show the method what a layer attends to."""
        method, query = self.stage.method, attention.query
        seen = method.observe(attention, self.positions, layer)
        self.looked = check_figures(method, "observe()", seen, (query.shape[0], query.shape[2]), query)


@dataclass(eq=False)
class Prompt(Forward):
    """A prompt with pictures, and what is left of it so far.

    layout, ids : where its pictures are, and its token ids ``[B, S]`` on the CPU.
    encoded : the pictures and clips of this call.
    total : ``[B, S]`` on the CPU, what is left, over all stages that have worked.
    history : the same stage by stage.
    residuals : what is added to the tokens that are left, behind all stages before the language model.
    arguments : per phase, arguments of the layers that replace the caller's.
    passes : of every stage inside the language model that has worked, its budget per unit and how many tokens these had before
        it and behind every layer, ``[N]`` long on the CPU.
    prepared : per class of method, figures by place of what entered the language model, ``[B, S]``.
    marks : by name what stages said of tokens, by place, ``[B, S]`` float32; NaN where they said nothing.
    together : which tokens attend to each other both ways, ``[B, S]`` long on the CPU, see :meth:`Family.bidirectional_groups
        <mmaccel.families.base.Family.bidirectional_groups>`; None where none looks ahead of itself.
    chunked : its chunks, where the lower layers read it in several.
    turned : cosines and sines of the tokens that are left, by phase and kind of RoPE, where layers have several.
    looked : figures per key that the method at the next layer made of the attention before it, ``[B, q]``.
    first_time : ``[B]`` bool on the CPU, rows without a picture in the cache before this prompt.
    """

    layout: Layout
    ids: Tensor
    encoded: Mapping[Modality, Encoded]
    total: Reduction
    history: list[StageResult] = field(default_factory=list)
    residuals: list[Residual] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    passes: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)
    prepared: dict[type, dict[str, Tensor]] = field(default_factory=dict)
    marks: dict[str, Tensor] = field(default_factory=dict)
    looked: dict[str, Tensor] = field(default_factory=dict)
    together: Tensor | None = None
    chunked: Chunked | None = None
    turned: dict[tuple[int, str], tuple[Tensor, ...]] = field(default_factory=dict)
    first_time: Tensor | None = None

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
        """Places that stay, left-padded: ``[B, widest]`` long with -1 for padding, and whether there is any; on the CPU."""
        width = int(kept.sum(1).max())
        order = true_last(kept)[:, -width:] if width else kept.new_zeros(len(kept), 0).long()
        there = kept.gather(1, order)
        return order.masked_fill(~there, -1), not bool(there.all())

    def begin(self, first: int, chosen: Tensor, padded: bool, device: torch.device, **arguments: Any) -> None:
        """From layer ``first`` of the language model on the tokens at ``chosen [B, q]`` (places of this forward on the CPU, -1
        padding) are left."""
        places = torch.where(chosen < 0, -1, chosen + self.seen).to(torch.int32)
        phase = Phase(places.to(device, non_blocking=True), padded, chosen)
        if self.together is not None:
            before = self.together.new_full((len(chosen), self.seen), -1)
            phase.together = torch.cat([before, self.together], dim=1).to(device, non_blocking=True)
        self.incoming.phases.append((self.plan.family.stored_from(first), phase))
        self.arguments.append(arguments)

    def slots(self, chosen: Tensor) -> Tensor:
        """``[B, S]`` long: the slot of each place in ``chosen [B, q]``; meaningless for places that are gone."""
        out = torch.zeros(len(chosen), self.length, dtype=torch.long)
        b, slot = (chosen >= 0).nonzero(as_tuple=True)
        out[b, chosen[b, slot]] = slot
        return out

    def entered(self, units: Units) -> Tensor:
        """How many tokens of each unit entered the language model, ``[N]`` long on the CPU."""
        chosen = chosen_of(self.incoming.phases[0][1])
        there = torch.zeros(self.total.kept.shape, dtype=torch.bool)
        rows, slots = (chosen >= 0).nonzero(as_tuple=True)
        there[rows, chosen[rows, slots]] = True
        return units.only(there).valid.sum(1)


def chosen_of(phase: Phase) -> Tensor:
    """Which places of a prompt a phase holds, ``[B, q]`` long on the CPU."""
    if phase.chosen is None:
        raise RuntimeError("the phase of a prompt knows which of its tokens are left")
    return phase.chosen


def sent(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Whole numbers and masks from the CPU on a device, all of them long: one copy, which the host does not wait for."""
    flat = torch.cat([x.flatten().long() for x in tensors]).to(device, non_blocking=True)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """``x [B, S, D]`` at ``at [B, q]``."""
    return x.gather(1, at.to(x.device)[..., None].expand(-1, -1, x.shape[-1]))
