"""Reactivation: tokens that a prompt dropped between layers wait with the cache, and may run again in later forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.precision import without_autocast
from ...core.reduction import Reduction
from ...errors import UnsupportedError
from ...kv.cache import CacheState
from ...kv.index import KeyIndex
from ...kv.reactivation import Parked, ReactivationMemory
from ...kv.sparse import SparseRead
from ...method import LayerAttention, ReactivatingMethod
from ...method.results import check_tensor, figures_of
from ..call.forward import Continuation, LayerArguments, Prompt, rows_at, to_device_packed
from ..call.plan import ModelPlan, PlannedStage
from ..call.runs import LayerAttended, Run


def may_return(plan: ModelPlan, state: CacheState) -> bool:
    """Whether tokens may come back in a forward behind a prompt: some wait at the layers of this plan, and at no others."""
    memory = state.shared.memory(ReactivationMemory)
    waits = memory is not None and memory.dropped and set(memory.at) == set(plan.stage_at_layer)
    return waits and bool(plan.reactivates)


def check_rows(prompt: Prompt) -> None:
    """Refuse a prompt in which a row has no picture whose dropped tokens would come back in a forward without pictures."""
    rows, state = prompt.text_rows, prompt.state
    if rows is None or state is None or not may_return(prompt.plan, state):
        return
    memory = state.shared.memory(ReactivationMemory)
    assert memory is not None
    dropped = torch.stack([waiting.stayed.sum(1) < memory.visual.sum(1) for waiting in memory.at.values()]).any(0)
    if bool((refused := dropped.cpu() & rows).any()):
        row = int(refused.nonzero()[0])
        names = ", ".join(sorted({stage.method.name for stage in prompt.plan.stage_at_layer.values()}))
        raise UnsupportedError(
            f"Row {row} of this batch has no new picture, and other rows have one: {names} can bring tokens of earlier "
            "pictures back only in a call in which no row has a new picture. Give this row a call of its own."
        )


# --- a prompt -----------------------------------------------------------------------------------------------------------
def keep_dropped(
    prompt: Prompt, number: int, made: Reduction, hidden: Tensor, slots: Tensor, arguments: Mapping[str, Any]
) -> None:
    """Let the tokens that layer ``number`` of the language model drops of a prompt wait with its cache.

    made : ``[B, S]`` on the CPU, the tokens that reached the layer and those that stay.
    hidden : ``[B, q, D]``, the input of the layer, with place ``s`` at ``slots [B, S]`` (on the CPU).
    arguments : those of the layer for the same tokens.
    """
    if prompt.state is None:
        return
    shared, visual = prompt.state.shared, prompt.layout.visual
    places, _ = prompt.compacted(made.valid & ~made.kept)
    dropped = places >= 0
    at, where, stayed, candidates = to_device_packed(
        hidden.device,
        slots.gather(1, places.clamp(min=0)),
        torch.where(dropped, places + prompt.seen, -1),
        made.kept & visual,
        made.valid & visual,
    )
    memory = shared.memory(ReactivationMemory) or shared.keep(ReactivationMemory(candidates[:, :0].bool()))
    if number == min(prompt.plan.stage_at_layer):
        memory.note(candidates.bool(), prompt.seen)
    types = prompt.plan.family.of_tokens(arguments, lambda x: x.gather(1, at.to(x.device)))
    planes = {"hidden": rows_at(hidden, at), **_position_planes(arguments, at), **types}
    memory.add(number, Parked(where.int(), dropped.sum(1), planes), stayed.bool(), prompt.seen)


def _position_planes(arguments: Mapping[str, Any], at: Tensor) -> dict[str, Tensor]:
    """The positions, and their cosines and sines, in the ``arguments`` of a layer for the tokens ``at [B, r]``; axes last."""
    planes = {}
    for name, x in zip(("cos", "sin"), arguments.get("position_embeddings") or (), strict=False):
        planes[name] = rows_at(x.expand(len(at), -1, -1), at)
    if isinstance(positions := arguments.get("position_ids"), Tensor):
        planes["positions"] = rows_at(_axes_last(positions).expand(len(at), -1, -1), at)
    return planes


def _axes_last(positions: Tensor) -> Tensor:
    """Positions ``[B, q]`` or ``[axes, B, q]`` -> ``[B, q, axes]``."""
    return positions.reshape(-1, *positions.shape[-2:]).permute(1, 2, 0)


# --- forwards behind it -------------------------------------------------------------------------------------------------
class Reactivation(Run):
    """Tokens of the prompt that come back in one forward behind it.

    stages : by layer of the language model, the method that drops and recalls tokens at its input.
    """

    reads_keys = True

    def __init__(self, forward: Continuation, stages: Mapping[int, PlannedStage[ReactivatingMethod]]) -> None:
        assert forward.state is not None
        memory = forward.state.shared.memory(ReactivationMemory)
        assert memory is not None
        self.forward, self.stages, self.state, self.memory = forward, stages, forward.state, memory
        #: by place what a method made of the attention of the last layer that it looked at, ``[B, n]`` each
        self._figures: dict[str, Tensor] = {}
        #: which of these places are visual tokens that it has seen, ``[B, n]`` bool
        self._candidates: Tensor | None = None
        #: the tokens that run beside the new ones
        self._back: Parked | None = None

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Put tokens that come back in front of the new ones; see :meth:`_come_back`."""
        if (stage := self.stages.get(number)) is None:
            return hidden
        with without_autocast(hidden.device):
            return self._come_back(stage.method, number, hidden, arguments)

    def after_attention(self, layer: LayerAttended) -> None:
        """Note the figures that the method at the next layer computes from the attention."""
        family, query = self.forward.plan.family, layer.query
        if (stage := self.stages.get(family.attending[layer.number] + 1)) is None:
            return
        places = self.forward.phase(layer.number).places.to(query.device)
        new = torch.arange(places.shape[1], device=places.device) >= places.shape[1] - self.forward.length
        attention = LayerAttention(query, layer.key, layer.visible, layer.scaling, (places >= 0) & new)
        seen = figures_of(stage.method, attention)
        at, n = _by_place(self.forward.index(layer.number), self.memory, query.device)
        self._figures = {name: _placed(x, at, n) for name, x in seen.items()}
        self._candidates = _placed(at < n, at, n) & self.memory.visual.to(query.device)

    def _come_back(
        self, method: ReactivatingMethod, number: int, hidden: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        """The input of layer ``number`` of the language model: in front of the new tokens, the last of ``hidden [B, q, D]``,
        those that come back. Reads and arguments of the layers behind are noted; the host waits once, for numbers of
        tokens."""
        forward, memory = self.forward, self.memory
        first, length = forward.plan.family.stored_from(number), forward.length
        new, waiting = hidden[:, -length:], memory.at[number]
        aside, old = waiting.aside, waiting.aside.places.shape[1]
        if self._back is not None:
            # tokens that are no longer chosen wait from here on
            ran = {**self._back.planes, "hidden": hidden[:, :-length]}
            aside = aside.joined(replace(self._back, planes=ran))
        chosen = self._recalled(method, waiting.stayed.sum(1), hidden.device)
        wanted = chosen.gather(1, aside.places.long().clamp(min=0)) & (aside.places >= 0)
        index = self.state.layers[first].index
        at, n = _by_place(index, memory, hidden.device)
        unread = _placed(at < n, at, n) & memory.visual.to(hidden.device) & ~chosen
        back_count, unread_count, old_count = torch.stack([x.sum(1) for x in (wanted, unread, wanted[:, :old])]).cpu()
        back, rest = aside.split(wanted, back_count)
        memory.at[number] = replace(waiting, aside=rest)
        forward.stats.tokens_returned += int(old_count.sum())
        read = chosen | ~memory.visual.to(chosen.device)
        sparse = SparseRead(read, index, unread_count.tolist()) if unread_count.any() else None
        forward.incoming.reads.append((first, sparse))
        return self._run(back, first, new, arguments)

    def _run(self, back: Parked, first: int, new: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Let tokens run ``back`` through the layers from ``first`` (of the cache) on, beside the ``new [B, q, D]``."""
        forward = self.forward
        own = forward.incoming.phases[0][1]
        if not back.places.shape[1]:
            forward.incoming.phases.append((first, own))
            self._back, forward.arguments = None, []
            return new
        forward.incoming.phases.append((first, own.behind(back.places, back.lengths)))
        # the new ones are text, of type 0
        types = forward.plan.family.of_tokens(back.planes, lambda x: pad(x, (0, forward.length)))
        self._back, forward.arguments = back, [LayerArguments({**_arguments(back, arguments), **types})]
        return torch.cat([back.planes["hidden"], new], dim=1)

    def _recalled(self, method: ReactivatingMethod, count: Tensor, device: torch.device) -> Tensor:
        """``[B, n]`` bool, the visual tokens that the layers behind see."""
        assert self._candidates is not None
        figures = {name: x.to(device) for name, x in self._figures.items()}
        seen = self._candidates.to(device)
        return check_tensor(method, "recall()", method.recall(figures, seen, count), "bool", seen.shape, seen)


def _arguments(back: Parked, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the layers for the tokens that come ``back`` and the new ones, whose own are in ``kwargs``."""
    rows, planes = len(back.places), back.planes
    arguments: dict[str, Any] = {}
    if (given := kwargs.get("position_embeddings")) is not None:
        pairs = zip((planes["cos"], planes["sin"]), given, strict=True)
        arguments["position_embeddings"] = tuple(
            torch.cat([x.to(y.device), y.expand(rows, -1, -1)], dim=1) for x, y in pairs
        )
    if isinstance(given := kwargs.get("position_ids"), Tensor):
        arguments["position_ids"] = None
        if "positions" in planes:
            # text may have positions on one axis, and pictures on three
            parts = planes["positions"].to(given.device), _axes_last(given)
            axes = max(part.shape[-1] for part in parts)
            both = torch.cat([part.expand(rows, -1, axes) for part in parts], dim=1).permute(2, 0, 1)
            arguments["position_ids"] = both[0] if axes == 1 and given.dim() == 2 else both
    return arguments


def _by_place(index: KeyIndex, memory: ReactivationMemory, device: torch.device) -> tuple[Tensor, int]:
    """``[B, K]`` long: the place of each slot of an index if it is among the first ``n``, else ``n``. Heads that store
    different keys all have those that may come back."""
    known, n = index.by_head[:, 0].long().to(device), memory.visual.shape[1]
    return torch.where((known >= 0) & (known < n), known, n), n


def _placed(x: Tensor, at: Tensor, n: int) -> Tensor:
    """``x [B, K]`` of slots by place, ``[B, n]``."""
    return x.new_zeros(len(x), n + 1).scatter(1, at, x)[:, :n]
