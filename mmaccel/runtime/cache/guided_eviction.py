"""Eviction by guide texts that are read behind the cache: all layers are scored together, and evicted keys leave means."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.masks import question
from ...core.precision import without_autocast
from ...core.reduction import top_mask
from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.layer import KeptKeys
from ...kv.layer_batch import LayerBatch, batches
from ...kv.merge import averaged
from ...kv.packed import QuantisedLayer
from ...kv.select import protected
from ...method import KeyBatch, LayerAttention
from ...method.guides import Fold, GuidedPolicy, RatedKeys
from ...method.results import check_numbers, check_tensor
from ..call.call import Call
from ..call.forward import Prompt
from ..call.plan import ModelPlan, PlannedStage
from ..prompt.lookahead import run_behind
from ..prompt.preview import LayerReached, TextBehind
from .eviction import EvictByText
from .prompt_eviction import PromptEviction, room_on
from .rotation import positions_of, turn_layer, turned

#: queries whose attention is computed at once
ROWS = 32


@dataclass
class KeyPositions:
    """Positions of the keys of every layer of a cache, which differ between layers once keys were averaged.

    at : of every layer ``[axes, B, n]`` long, by place; meaningless for places that it does not store.
    """

    at: list[Tensor]

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        self.at = [x[:, to_device(rows, x.device)] for x in self.at]

    def copy(self) -> KeyPositions:
        """A copy to change independently."""
        return KeyPositions(list(self.at))

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on."""
        self.at = [x[..., :seen] for x in self.at]

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Keep the places that are ``held [n]`` bool."""
        self.at = [x[..., held[: x.shape[2]].to(x.device)] for x in self.at]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors on the device."""
        yield from self.at


class GuideText(TextBehind):
    """A guide text behind the cache.

    rated : the layers whose keys it rates. both_ways : whether all of its tokens see each other where keys are rated.
    paid : of each of these, the attention that it pays to the stored keys, ``[B, K]`` float32, mean over heads and tokens.
    """

    def __init__(self, rated: Sequence[int], both_ways: bool, *given: Any) -> None:
        super().__init__(*given)
        self.rated, self.both_ways, self.paid = rated, both_ways, dict[int, Tensor]()

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`.preview.TextBehind`."""
        keys, values, visible = super().attend(number, query, key, value, scaling, window)
        self.found.clear()
        number = self.stored_from(number)
        if number in self.rated:
            with without_autocast(query.device):
                real = self.places.to(query.device) >= 0
                shown = visible
                if self.both_ways:
                    own = torch.zeros_like(visible)
                    own[..., -real.shape[1] :] = real[:, None, None]
                    shown = visible | own
                attention = LayerAttention(query, keys, shown, scaling, real)
                parts = [
                    attention.attention(first, min(first + ROWS, real.shape[1])).mean(1)
                    for first in range(0, real.shape[1], ROWS)
                ]
                rows = torch.cat(parts, dim=1).masked_fill(~real[..., None], 0.0)
                self.paid[number] = rows.sum(1)[:, : -real.shape[1]] / real.sum(1, keepdim=True)
        if len(self.paid) == len(self.rated):
            # the layers behind need not run
            raise LayerReached
        return keys, values, visible


@dataclass
class ChosenFrom:
    """Keys that are chosen from, of layers that are the rows of one batch, in the order of their places.

    layers : of the cache. batch : their keys, or their new ones.
    slots : ``[R, n]`` long, the slot of each among all that its layer stores.
    compete, must : ``[R, n]`` bool, keys that compete for the budget, and those of them that stay in any case.
    count : ``[R]`` long, how many stay.
    """

    layers: LayerBatch
    batch: KeyBatch
    slots: Tensor
    compete: Tensor
    must: Tensor
    count: Tensor


@dataclass
class Chosen:
    """The choice from some keys.

    of : these keys. kept : ``[R, n]`` bool, those that stay.
    scores : ``[R, n]`` float32, infinite for slots that hold a mean.
    means : the keys and values with the means among them; None where there are none.
    """

    of: ChosenFrom
    scores: Tensor
    kept: Tensor
    means: tuple[Tensor, Tensor] | None = None


class EvictByGuides(EvictByText):
    """Evict the keys of a prompt, and those of a stream beyond the cap, by what guide texts attend to."""

    policy: GuidedPolicy

    def __init__(
        self, call: Call[ModelPlan], prompt: Prompt, stage: PlannedStage[GuidedPolicy], state: CacheState
    ) -> None:
        super().__init__(call, prompt, stage, state)
        self._follows = state.positions.offset

    @property
    def shrinks(self) -> bool:
        """No: what exceeds the cap is evicted here, not by the schedule."""
        return False

    def read(self, evicted: PromptEviction) -> None:
        """Rate the keys of the prompt, and write the means of evicted ones, if any is evicted."""
        self._note_positions()
        budgets, waiting, whole = evicted.tokens.layer_budgets(), evicted.scores.waiting, evicted.tokens.text_rows
        if all(
            n <= k for number, one in waiting.items() for n, k in zip(one.tokens.rivals, budgets[number], strict=True)
        ):
            return
        found = []
        for layers in self._batches([one.layer for one in waiting.values()], evicted.scores.kind):
            candidates = evicted.scores.candidates(layers)
            batch, device = candidates.keys, candidates.keys.keys.device
            compete = batch.valid if self.policy.joint else batch.valid & batch.visual
            count = torch.tensor([budgets[layer.number] for layer in layers.layers]).flatten()
            if self.policy.joint and whole is not None:
                text = whole.repeat(len(layers.layers))
                compete, count = compete & ~to_device(text, device)[:, None], count.masked_fill(text, 0)
            must = protected(self.policy, batch, evicted.prompt.seen == 0, candidates.tokens.question) & compete
            slots = torch.arange(layers.width - batch.index.shape[1], layers.width, device=device)
            found.append(
                ChosenFrom(layers, batch, slots.expand_as(batch.index), compete, must, to_device(count, device))
            )
        for one in self._chosen(found):
            width, each = one.of.batch.index.shape[1], one.of.layers
            parts = one.means or (one.of.batch.keys, one.of.batch.values)
            split = zip(each.layers, one.scores.split(each.rows), *(x.split(each.rows) for x in parts), strict=True)
            for layer, scores, keys, values in split:
                if one.means is not None:
                    layer.keys = torch.cat([layer.keys[:, :, :-width], keys], dim=2)
                    layer.values = torch.cat([layer.values[:, :, :-width], values], dim=2)
                evicted.scores.reread[layer.number] = scores[:, None].expand(-1, layer.keys.shape[1], -1)

    def finish(self) -> None:
        """Evict, from the prompt and then down to the cap; give keys new positions where these run out."""
        super().finish()
        with self.forward.measured("selection", self.forward.device):
            self._to_cap()
            with without_autocast(self.forward.device):
                self._reindex()

    def _batches(
        self, layers: Sequence[QuantisedLayer], kind: Callable[[QuantisedLayer], Hashable]
    ) -> Iterator[LayerBatch]:
        """Layers that can be rows of one batch."""
        depth, room = len(self.state.layers), room_on(layers[0].keys.device)
        return batches(layers, lambda one: (kind(one), self.policy.role(one.number, depth)), room)

    # --- a cap ----------------------------------------------------------------------------------------------------
    def _to_cap(self) -> None:
        """Keep the best ``cap`` keys of every layer that stores more."""
        assert self.prompt is not None
        layers, cap = self.state.layers, self.policy.cap
        if not cap or all(len(layer.index) <= cap for layer in layers):
            return
        table, found = self.prompt.tokens.table, []
        for group in self._batches(layers, lambda layer: len(layer.index)):
            batch, order = self.schedule.stored(group, table)
            slots = torch.arange(batch.index.shape[1], device=batch.index.device).expand_as(batch.index)
            must = protected(self.policy, batch, True, None)
            count = torch.full((len(slots),), cap, device=slots.device)
            found.append(ChosenFrom(group, batch, slots if order is None else order, batch.valid, must, count))
        for one in self._chosen(found):
            group, batch = one.of.layers, one.of.batch
            given = one.means or (batch.keys, batch.values)
            left = KeptKeys.of(
                *given, batch.index[:, None].int(), one.kept[:, None], None, group.lengths.clamp(max=cap)
            )
            for layer, mine in zip(group.layers, left.split(group.rows), strict=True):
                layer.take(mine)

    # --- scores, and means ----------------------------------------------------------------------------------------
    def _chosen(self, found: list[ChosenFrom]) -> Iterator[Chosen]:
        """What stays of all of these; what is chosen from is free before the next ones are."""
        paid = self._paid()
        with without_autocast(self.forward.device):
            mine = [
                torch.cat([paid[layer.number] for layer in one.layers.layers]).gather(1, one.slots) for one in found
            ]
            scores = self._rated(found, mine)
            while found:
                yield self._fold(found.pop(0), scores.pop(0), mine.pop(0))

    def _rated(self, found: Sequence[ChosenFrom], paid: Sequence[Tensor]) -> list[Tensor]:
        """The scores of the policy, ``[R, n]`` each."""
        orders = [(~one.compete).byte().argsort(dim=1, stable=True) for one in found]
        layers, given, there = [], [], []
        for one, pays, order in zip(found, paid, orders, strict=True):
            layers += [layer.number for layer in one.layers.layers]
            given += pays.gather(1, order).split(one.layers.rows)
            there += one.compete.gather(1, order).split(one.layers.rows)
        rising = sorted(range(len(layers)), key=layers.__getitem__)
        rated = self.policy.rate([given[at] for at in rising], [there[at] for at in rising])
        by_layer = dict(zip(sorted(layers), rated, strict=True))
        out = []
        for one, order in zip(found, orders, strict=True):
            scores, real = (
                torch.cat([by_layer[layer.number] for layer in one.layers.layers]),
                one.compete.gather(1, order),
            )
            scores = check_tensor(self.policy, "rate()", scores, "float", real.shape, real)
            check_numbers(self.policy, "rate()", scores[:, None], real[:, None])
            out.append(torch.zeros_like(scores).scatter(1, order, scores.masked_fill(~real, 0.0)))
        return out

    def _fold(self, one: ChosenFrom, scores: Tensor, paid: Tensor) -> Chosen:
        batch, layers, memory = one.batch, one.layers.layers, self.state.shared.memory(KeyPositions)
        assert memory is not None
        ranked = scores.masked_fill(one.must, torch.inf).masked_fill(~one.compete, -torch.inf)
        frame = torch.full_like(batch.index, -1)
        if batch.picture is not None and batch.cells is not None:
            frame = torch.where(batch.cells[..., 0] < 0, -1, (batch.picture << 32) + batch.cells[..., 0])
        rated = RatedKeys(layers[0].number, len(self.state.layers), ranked, one.compete, paid, one.count, frame)
        fixed, fold = batch.valid & ~one.compete, self.policy.fold(rated)
        if fold is None:
            return Chosen(one, scores, top_mask(ranked, one.compete, one.count) | fixed)
        holds = holds_mean(fold.onto)
        kept = top_mask(ranked.masked_fill(holds, torch.inf), one.compete, one.count) | fixed
        table = torch.cat([memory.at[layer.number] for layer in layers], dim=1)
        at = table.gather(2, batch.index.clamp(min=0).expand(len(table), -1, -1))
        text = self.forward.plan.family.text
        keys, values, at = fold_keys(text, batch.keys, batch.values, at, kept & ~holds, fold)
        table = _written(table, batch.index, at)
        for layer, mine in zip(layers, table.split(one.layers.rows, dim=1), strict=True):
            memory.at[layer.number] = mine.clone() if len(layers) > 1 else mine
        return Chosen(one, scores.masked_fill(holds, torch.inf), kept, (keys, values))

    # --- guide texts ----------------------------------------------------------------------------------------------
    def _paid(self) -> dict[int, Tensor]:
        """Of every layer the attention that its guide pays to the keys that it stores, ``[B, K]`` float32."""
        assert isinstance(self.forward, Prompt)
        prompt, policy, depth = self.forward, self.policy, len(self.state.layers)
        paid: dict[int, Tensor] = {}
        end = prompt.seen + prompt.length
        for number, text in enumerate(policy.guides(_template(prompt.plan.family.processor))):
            rated = [layer for layer in range(depth) if policy.guide(layer, depth) == number]
            if not rated:
                continue
            ids, real = self._ids(text)
            at = torch.arange(end, end + ids.shape[1], device=prompt.device).expand_as(ids)
            layers = self.state.layers, prompt.plan.family.stored_from, at.masked_fill(~real, -1)
            behind = GuideText(rated, policy.official, *layers)
            hooks = self._unchanged() if policy.official else []
            try:
                with suppress(LayerReached):
                    run_behind(self.call, prompt, behind, at, self.arguments.get("position_ids"), {"input_ids": ids})
            finally:
                for hook in hooks:
                    hook.remove()
            paid |= behind.paid
        return paid

    def _ids(self, text: str) -> tuple[Tensor, Tensor]:
        """The tokens of a text ``[B, n]`` long, and which are no padding; without a tokenizer, or a text, those of the
        question."""
        assert isinstance(self.forward, Prompt)
        prompt, rows = self.forward, len(self.forward.ids)
        processor = prompt.plan.family.processor
        tokenizer = getattr(processor, "tokenizer", processor)
        if text and tokenizer is not None:
            ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=prompt.device)
            return ids.expand(rows, -1), torch.ones(rows, ids.shape[1], dtype=torch.bool, device=prompt.device)
        layout = prompt.layout
        asked = question(layout.valid & ~layout.visual, layout.visual)
        width = int(asked.sum(1).max())
        order = (~asked).byte().argsort(dim=1, stable=True)[:, :width]
        return to_device(prompt.ids.gather(1, order), prompt.device), to_device(asked.gather(1, order), prompt.device)

    def _unchanged(self) -> list[Any]:
        """Hooks that give every layer what the first one is given."""
        family, entered = self.forward.plan.family, list[Tensor]()

        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden = args[0] if args else kwargs["hidden_states"]
            entered.append(hidden)
            first = entered[0].to(hidden.device)
            return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": first})

        return [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in family.text.layers]

    # --- positions ------------------------------------------------------------------------------------------------
    def _note_positions(self) -> None:
        """Note the positions of the tokens of this prompt, and of the text since the last one."""
        prompt, shared = self.forward, self.state.shared
        given = self.arguments["position_ids"]
        given = (given[-3:] if given.dim() == 3 else given[None]).long()
        places, end = prompt.phase(0).places.to(given.device).long(), prompt.seen + prompt.length
        at = torch.arange(end + 1, device=given.device).expand(len(given), len(places), -1)
        if self._follows is not None:
            at = at - self._follows.to(given.device)[:, None]
        spare = torch.where(places < 0, end, places)
        at = at.scatter(2, spare.expand(len(given), -1, -1), given.expand(-1, len(places), -1))[..., :end]
        memory = shared.memory(KeyPositions)
        known = [None] * len(self.state.layers) if memory is None else memory.at
        tables: list[Tensor] = []
        for layer, before in zip(self.state.layers, known, strict=True):
            own = to_device(at, layer.keys.device)
            tables.append(own if before is None else torch.cat([before, own[..., before.shape[2] :]], dim=2))
        shared.keep(KeyPositions(tables))

    def _reindex(self) -> None:
        """Move the keys of all layers to positions behind each other, where the policy moves keys and it is time."""
        memory, policy, positions = self.state.shared.memory(KeyPositions), self.policy, self.state.positions
        if not policy.moves or memory is None or positions.offset is None:
            return
        family, layers = self.forward.plan.family, self.state.layers
        end = self.forward.seen + self.forward.length
        follows = end - positions.offset
        bound = policy.bound(positions_of(family.text.config)) if len(memory.at[0]) == 1 else None
        due = None if bound is None else follows - 1 > bound
        found = [self._stored(layer, memory) for layer in layers]
        if due is not None and bool(due.any()):
            longest = torch.stack([to_device(layer.index.lengths[:, 0], follows.device) for layer in layers]).amax(0)
            follows = torch.where(due, family.first_position + longest, follows)
            new = [
                torch.where(due.to(at.device)[:, None], reindexed(at, valid, to_device(follows, at.device)), at)
                for at, valid in found
            ]
            positions.offset = end - follows
        elif policy.official:
            new = [at + _shift(at, valid, to_device(follows, at.device)) for at, valid in found]
        else:
            return
        for layer, (at, valid), moved in zip(layers, found, new, strict=True):
            turn_layer(family.text, layer, (moved - at).masked_fill(~valid, 0)[:, :, None])
            memory.at[layer.number] = _written(memory.at[layer.number], layer.index.by_head[:, 0].long(), moved)

    def _stored(self, layer: QuantisedLayer, memory: KeyPositions) -> tuple[Tensor, Tensor]:
        """The positions ``[axes, B, K]`` of what a layer stores, and which slots hold a key ``[B, K]``."""
        place, table = layer.index.by_head[:, 0].long(), memory.at[layer.number]
        return table.gather(2, place.clamp(min=0).expand(len(table), -1, -1)), place >= 0


def fold_keys(
    text: Any, keys: Tensor, values: Tensor, at: Tensor, stay: Tensor, fold: Fold
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[B, Hkv, n, D]`` with the means of a fold in the slots that hold them, and the positions of all.

    text : the text model, whose RoPE has turned the keys. at : ``[axes, B, n]`` long, their positions.
    stay : ``[B, n]`` bool, the keys that stay as they are, of which a mean stands ``behind`` the last.
    """
    onto, holds = fold.onto, holds_mean(fold.onto)
    slots = onto.clamp(min=0).expand_as(at)
    new = at
    if fold.behind:
        last = at.amax(0).masked_fill(~stay, -1).amax(1, keepdim=True)
        new = torch.where(holds & (last >= 0), last + 1, at)
    by = torch.where(onto >= 0, new.gather(2, slots) - at, 0)
    means = averaged(turned(text, keys, by[:, :, None]), onto, fold.weight), averaged(values, onto, fold.weight)
    here = holds[:, None, :, None]
    return torch.where(here, means[0], keys), torch.where(here, means[1], values), new


def holds_mean(onto: Tensor) -> Tensor:
    """``[B, n]`` bool: the slots that keys flow ``onto [B, n]``."""
    width = onto.shape[1]
    named = torch.zeros(len(onto), width + 1, dtype=torch.bool, device=onto.device)
    return named.scatter_(1, torch.where(onto < 0, width, onto), True)[:, :width]


def reindexed(at: Tensor, valid: Tensor, end: Tensor) -> Tensor:
    """Positions ``[1, B, n]`` behind each other in the order of ``at [1, B, n]`` for the keys that are ``valid [B, n]``, the
    last of them before ``end [B]``."""
    order = at[0].masked_fill(~valid, torch.iinfo(at.dtype).max).argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=at.device).expand_as(order))
    return (rank + (end - valid.sum(1))[:, None])[None]


def _written(table: Tensor, places: Tensor, at: Tensor) -> Tensor:
    """A ``table [axes, B, n]`` by place that says ``at [axes, B, K]`` of ``places [B, K]``, -1 for none."""
    spare = torch.where(places < 0, table.shape[2], places).expand_as(at)
    return torch.cat([table, table[..., :1]], dim=2).scatter(2, spare, at)[..., :-1]


def _shift(at: Tensor, valid: Tensor, end: Tensor) -> Tensor:
    """``[B, 1]`` long: how far keys at ``at [axes, B, n]`` move so that the last of them is before ``end [B]``."""
    return (end - 1 - at.amax(0).masked_fill(~valid, -(1 << 40)).amax(1))[:, None]


def _template(processor: Any) -> str:
    """What the chat template of a processor writes between a question and its answer; empty without one."""
    apply: Callable[..., str] | None = getattr(processor, "apply_chat_template", None)
    tokenizer = getattr(processor, "tokenizer", processor)
    if apply is None or not (getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)):
        return ""
    mark = "question"
    messages = [{"role": "user", "content": [{"type": "text", "text": mark}]}]
    return apply(messages, add_generation_prompt=True, tokenize=False).rpartition(mark)[2]
