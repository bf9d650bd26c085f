"""The door: every family ends in one call of its text model, and there prefill reductions happen.

:class:`Door` hooks that call and the decoder layers. :class:`Step` is one such call while mmaccel shapes it: which tokens
are left at each layer, where they came from, and what attention must still do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..core.budget import counts
from ..core.layout import Layout, Units
from ..core.reduction import Reduction
from ..core.stats import Stage
from ..errors import MmaccelError, UnsupportedError
from ..kv.cache import CacheState, adopt, cache_bytes, check_plain, state_of
from ..kv.codecs import Among, Kind
from ..kv.index import KeyIndex
from ..kv.scoring.importance import energy
from ..kv.sparse import SparseRead
from ..method import LayerAttention, LayerMethod, Policy, ProjectorMethod, TokenBatch, TokenMethod
from .eviction import Eviction
from .packing import Packing
from .scope import Passage, Scope, current

if TYPE_CHECKING:
    from ..accelerate import Accelerator


@dataclass
class Phase:
    """The layers between two reductions see the same tokens.

    places : ``[B, q]`` long, the place of each token in the unreduced sequence; -1 for padding.
    padded : whether any is padding.
    chosen : the same on the CPU, as places of this forward; None where every one of them stays and none is padding.
    extra : layer arguments that replace the caller's from here on (None in the first phase).
    """

    places: Tensor
    padded: bool
    chosen: Tensor | None = None
    extra: dict[str, Any] | None = None
    _indices: dict[torch.device, KeyIndex] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of every row that are no padding, ``[B]`` long on the CPU."""
        if self.padded and self.chosen is not None:
            return (self.chosen >= 0).sum(1)
        return torch.full((len(self.places),), self.places.shape[1])

    def shared_index(self, upto: int, device: torch.device) -> KeyIndex:
        """One index of these places for all layers on ``device`` that store them first."""
        if device not in self._indices:
            lengths = self.lengths[:, None]
            self._indices[device] = KeyIndex(self.places.to(device), self.padded, upto, lengths)
        return self._indices[device]


class Step:
    """One forward of the text model that mmaccel shapes.

    Parameters
    ----------
    seen : tokens the cache has seen before.
    length : tokens of this forward before any reduction.
    """

    def __init__(self, owner: Accelerator, scope: Scope, state: CacheState | None, seen: int, length: int) -> None:
        self.owner, self.scope, self.state = owner, scope, state
        self.seen, self.length = seen, length
        self.layout: Layout | None = None
        #: ``[B, S]`` on the CPU, with the layout
        self.ids: Tensor | None = None
        #: ``[B, S]`` on the CPU: what is left so far
        self.total: Reduction | None = None
        self.trail: list[Passage] = []
        self.phases: list[tuple[int, Phase]] = []
        self.looked: dict[str, Tensor] = {}
        self.kinds: Tensor | None = None
        self.reading: SparseRead | None = None
        self.eviction = Eviction(self) if owner.policy is not None and state is not None else None
        #: ``[B, S]`` bool, the visual tokens that a codec stores better than the others
        self.salient: Tensor | None = None
        #: layers whose attention ran through our function
        self.attended = 0
        self.packing = Packing(self)

    def phase(self, layer: int) -> Phase:
        """The phase a layer belongs to."""
        return next(phase for first, phase in reversed(self.phases) if first <= layer)

    def index(self, layer: int) -> KeyIndex:
        """Where the keys that a layer attends to came from."""
        if self.state is not None:
            index = self.state.layers[layer].index
            if index is None:
                raise RuntimeError("the layer attends before it has stored its keys")
            if self.reading is not None and layer >= self.reading.first:
                return self.reading.index(index)
            return index
        phase = self.phase(layer)
        return phase.shared_index(self.seen + self.length, phase.places.device)

    def after_attention(self, number: int, query: Tensor, key: Tensor, visible: Tensor | None, scaling: float) -> None:
        """Called by the attention function with ``query [B, Hq, q, D]`` and ``key [B, Hkv, K, D]`` of layer ``number``."""
        self.attended += 1
        if self.layout is not None and number + 1 in self.owner.cuts:
            method = self.owner.built[self.owner.cuts[number + 1]][1]
            chosen = self.phase(number).chosen
            assert isinstance(method, LayerMethod) and chosen is not None
            text = (chosen >= 0) & ~self.layout.visual.gather(1, chosen.clamp(min=0))
            with self.measured("selection", query.device):
                looked = LayerAttention(query, key, visible, scaling, text.to(query.device, non_blocking=True))
                seen = method.look(looked)
            self.looked = {name: figures[:, -query.shape[2] :] for name, figures in seen.items()}
        if self.eviction is not None:
            with self.measured("selection", query.device):
                self.eviction.after_attention(number, query, key, visible, scaling)
        if (window := max((kind.codec.window for kind in self.owner.kinds), default=0)) and self.state is not None:
            there = self.phase(number).places.to(query.device, non_blocking=True)[:, -window:] >= 0
            self.packing.asked[number] = energy(query[:, :, -window:], there, key.shape[1])
        if self.eviction is None or not self.eviction.waiting:
            self.pack(number, query.device)

    def measured(self, name: str, device: torch.device) -> AbstractContextManager[None]:
        """The time of a stage, at a prompt; while decoding it is part of the step's, which has few launches to spare."""
        return self.scope.stats.clock.measure(name, device) if self.layout is not None else nullcontext()

    def pack(self, number: int, device: torch.device) -> None:
        """Let the recipe's codecs store layer ``number``, once nothing is evicted from it any more."""
        if not self.owner.kinds or self.state is None:
            return
        with self.measured("packing", device):
            self.packing.pack(self.state.layers[number])

    @cached_property
    def due(self) -> list[tuple[Kind, Among]]:
        """What the recipe's codecs may pack in this forward, of every layer alike."""
        each = ((kind, self.among(kind)) for kind in self.owner.kinds)
        return [(kind, among) for kind, among in each if among is not None]

    def tell_apart(self, embeds: Tensor) -> None:
        """Note what the recipe's codecs must know of a prompt, ``embeds [B, S, D]``."""
        assert self.layout is not None and self.total is not None
        if self.state is not None and any(kind.of == "text" for kind in self.owner.kinds):
            self.state.note_visual(self.layout.visual.to(embeds.device, non_blocking=True), self.seen)
        kept, visual = self.total.kept, self.layout.visual
        for kind in self.owner.kinds:
            if kind.of == "salient":
                of = (mask.to(embeds.device, non_blocking=True) for mask in (kept & visual, kept & ~visual))
                self.salient = kind.source.salient(embeds, *of).cpu()

    def among(self, kind: Kind) -> Among | None:
        """The places that tokens of a kind may be of; None where there are none in this forward."""
        assert self.state is not None
        if kind.of == "text":
            return Among(None if self.state.visual is None else ~self.state.visual, 0, True)
        if self.layout is None:
            return Among(None, 0, True) if kind.of == "all" else None
        # visual tokens are packed with the prompt they came with
        apart = self.salient if kind.codec.for_salient() is not None else None
        if kind.of == "all":
            return Among(None if apart is None else ~apart, self.seen, True)
        mask = self.salient if kind.of == "salient" else self.layout.visual
        return Among(mask if mask is None or apart is None else mask & ~apart, self.seen, False)

    # --- reducing ---------------------------------------------------------------------------------------------
    def reduce(self, stage: int, method: TokenMethod, hidden: Tensor, slots: Tensor | None) -> Reduction:
        """Run one method on what is left, and note it; returns its reduction in place coordinates ``[B, S]``.

        Parameters
        ----------
        hidden : ``[B, q, D]``.
        slots : ``[B, S]`` long on the CPU, where each place stands in ``hidden``; None when ``hidden`` is not compacted yet.
        """
        layout, total = self.layout, self.total
        assert layout is not None and total is not None
        device = hidden.device
        whole = layout.units(method.unit)
        units = whole.only(total.kept)
        retain = self.owner.built[stage][0].retain
        assert retain is not None
        official = method.official_count if self.owner.recipe.rounding == "official" else None
        present = units.valid.sum(1)
        primary = self.owner.recipe.primary
        least = self.owner.recipe.retain if primary is not None and stage < primary else None
        grids = [(t, h, w) for t, h, w in whole.grid.tolist()]
        follows = self.owner.recipe.anchor not in (None, stage)
        sizes = whole.valid.sum(1).tolist()
        count = counts(retain, sizes, present.tolist(), units.picture, least, official, grids, follows)
        places = units.places.clamp(min=0)
        at, rows, there, cells, grid, segment, tile, tiles, entered, wanted = _sent(
            device,
            places if slots is None else slots[units.row[:, None], places],
            units.row,
            units.valid,
            units.cells,
            units.grid,
            units.segment,
            units.tile,
            units.tiles,
            self.entered(whole) if self.phases else present,
            count,
        )
        valid = there.bool()
        signals = self.owner.taps.signals(method.taps(), self.scope.encoded, units) if method.taps() else {}
        if isinstance(method, LayerMethod):
            for name, figures in self.looked.items():
                signals[name] = figures.to(device)[rows[:, None], at].masked_fill(~valid, torch.nan)
        question, asked = self.question(method, hidden, slots, rows) if method.needs_question else (None, None)
        if method.text_tower is not None:
            signals["patches"] = self.owner.readers[method.text_tower].project(signals["features"][:, 0].to(device))
        tokens = TokenBatch(
            question=question,
            question_valid=asked,
            features=hidden[rows[:, None], at] * valid[..., None],
            valid=valid,
            cells=cells,
            grid=grid,
            segment=segment,
            tile=tile,
            tiles=tiles,
            entered=entered,
            signals={k: v.to(device) for k, v in signals.items()},
        )
        # a choice has no gradient; the values that are merged have theirs
        with torch.no_grad():
            made = _checked(method, method.reduce(tokens, wanted), units.valid, count)
        record = self.scope.stats.stages.setdefault(stage, Stage(method.site, method.name))
        record.tokens_in += int(present.sum())
        record.resolved = None if method.budget in ("adaptive", "none") else (record.resolved or 0) + int(count.sum())
        record.tokens_kept += (left := int(made.kept.sum()))
        if method.budget == "adaptive":
            self.scope.stats.notes.append(
                f"{method.name} lets the content decide: of {int(present.sum())} visual tokens {int(count.sum())} were asked "
                f"for, and {left} stay"
            )
        if left == int(present.sum()) and len(self.owner.built) > 1:
            self.scope.stats.notes.append(f"stage {stage} ({method.name}) left all {left} tokens that reached it")
        made = made.relabel(units.places, units.row, total.kept.shape).beside(total.kept & ~layout.visual)
        self.total = total.then(made)
        # figures per token, not its keys and features: this outlives the call
        shown = {
            name: x if x.dim() == 2 else x.sum(1) for name, x in signals.items() if x.dim() == 2 or "attention" in name
        }
        layer = int(method.layer) if isinstance(method, LayerMethod) else 0
        self.trail.append(Passage(stage, layer, self.total, units, shown))
        return made

    def entered(self, units: Units) -> Tensor:
        """How many tokens of each unit entered the language model, ``[N]`` long on the CPU."""
        chosen = self.phases[0][1].chosen
        assert self.total is not None and chosen is not None
        there = torch.zeros(self.total.kept.shape, dtype=torch.bool)
        rows, slots = (chosen >= 0).nonzero(as_tuple=True)
        there[rows, chosen[rows, slots]] = True
        return units.only(there).valid.sum(1)

    def question(
        self, method: TokenMethod, hidden: Tensor, slots: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The text behind the last picture of each unit's row, ``[N, q, D]`` and ``[N, q]`` bool; where none is, all text."""
        assert self.layout is not None
        visual = self.layout.visual
        text = self.layout.valid & ~visual
        behind = text & (visual.flip(1).cumsum(1).flip(1) == 0)
        asked = torch.where(behind.any(1, keepdim=True), behind, text)
        if method.text_tower is not None:
            self.scope.stats.notes.append(
                f"{method.name}: the question as the text tower of {method.text_tower!r} reads it"
            )
            assert self.ids is not None
            words = [self.owner.family.words(ids[mine]) for ids, mine in zip(self.ids, asked, strict=True)]
            found, there = self.owner.readers[method.text_tower].embed(words)
            found, there = found.to(hidden.device), there.to(hidden.device)
            return found[rows], there[rows]
        self.scope.stats.notes.append(f"{method.name}: the question as the language model itself embeds it")
        chosen, _ = self.compacted(asked)
        at = chosen.clamp(min=0)
        at, real = _sent(hidden.device, at if slots is None else slots.gather(1, at), chosen >= 0)
        return _rows(hidden, at)[rows], real.bool()[rows]

    def compacted(self, kept: Tensor) -> tuple[Tensor, bool]:
        """Places that stay, left-padded: ``[B, widest]`` long with -1 for padding, and whether there is any; on the CPU."""
        width = int(kept.sum(1).max())
        order = kept.long().argsort(dim=1, stable=True)[:, -width:] if width else kept.new_zeros(len(kept), 0).long()
        there = kept.gather(1, order)
        return order.masked_fill(~there, -1), not bool(there.all())

    def begin(
        self, first: int, chosen: Tensor, padded: bool, device: torch.device, extra: dict[str, Any] | None = None
    ) -> None:
        """From layer ``first`` on the tokens at ``chosen [B, q]`` (places of this forward on the CPU, -1 padding) are left."""
        places = torch.where(chosen < 0, -1, chosen + self.seen).to(torch.int32)
        self.phases.append((first, Phase(places.to(device, non_blocking=True), padded, chosen, extra)))

    def slots(self, chosen: Tensor) -> Tensor:
        """``[B, S]`` long: the slot of each place in ``chosen [B, q]``; meaningless for places that are gone."""
        out = torch.zeros(len(chosen), self.length, dtype=torch.long)
        b, slot = (chosen >= 0).nonzero(as_tuple=True)
        out[b, chosen[b, slot]] = slot
        return out


def _checked(method: TokenMethod, made: Reduction, valid: Tensor, count: Tensor) -> Reduction:
    """What a method made, on the CPU. One of somebody else's may be wrong; say so before the answers are."""
    shaped = made.kept.shape == valid.shape
    made = made.cpu() if shaped else made
    if not shaped or bool((made.kept & ~valid).any()):
        raise MmaccelError(f"Method {method.name!r} kept slots that hold no token.")
    kept = made.kept.sum(1)
    empty = (kept == 0) & (count > 0)
    over = kept != count if method.budget == "exact" else kept > count if method.budget == "at_most" else empty
    if bool((over | empty).any()):
        i = int((over | empty).nonzero()[0])
        raise MmaccelError(
            f"Method {method.name!r} has the budget class {method.budget!r} but kept {int(kept[i])} of "
            f"{int(valid[i].sum())} tokens where {int(count[i])} were resolved."
        )
    return made


class Door:
    """The hooks on the text model and its layers.

    ``hook`` takes the handle of every one as soon as it is registered, so that all can be removed whatever fails.
    """

    def __init__(self, owner: Accelerator, hook: Callable[..., None]) -> None:
        self.owner = owner
        text = owner.family.text
        self.layers = list(text.layers)
        hook(text.register_forward_pre_hook(self.enter, with_kwargs=True))
        hook(text.register_forward_hook(self.leave, with_kwargs=True, always_call=True))
        if owner.cuts:
            for number in range(min(owner.cuts), len(self.layers)):
                hook(self.layers[number].register_forward_pre_hook(self._layer(number), with_kwargs=True))

    # --- into the text model ----------------------------------------------------------------------------------
    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Reduce, or continue a cache that was reduced; anything else passes through untouched."""
        scope = current(self.owner)
        if scope is None:
            return None
        scope.step = None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            return None
        cache = kwargs.get("past_key_values")
        state = state_of(cache)
        scope.cache = cache if cache is not None else scope.cache
        ids, scope.input_ids = scope.input_ids, None
        length = embeds.shape[1]
        visual, prompt = 0, None
        # one new token is a decode step; looking for placeholders in it would cost every step
        prefill = length > 1
        # a candidate of prompt lookup may repeat a placeholder, when the pictures of this call are in the cache already
        guessed = scope.generating and state is not None and scope.layout is not None
        if prefill and not guessed and ids is not None and ids.shape == embeds.shape[:2]:
            prompt = ids.cpu()
            visual = int(self.owner.family.visual(prompt).sum())
            if visual:
                self.owner.note_pictures(scope, prompt)
        scope.timer = scope.stats.clock.start(embeds.device), "prefill" if prefill else "decode"
        scope.stats.prompt_tokens += embeds.shape[0] * length * prefill
        scope.stats.decode_steps += not prefill
        scope.stats.visual_tokens += visual
        if not self.owner.active or not (visual or state is not None):
            return None
        if self.owner.family.model.training:
            raise UnsupportedError("mmaccel accelerates inference; call model.eval() first.")
        self.owner.check_attached()
        if cache is not None and state is not None and cache.layers != state.layers:
            raise UnsupportedError(
                "The layers of this cache were exchanged after mmaccel reduced its prompt; start again with a new cache."
            )
        kwargs = dict(kwargs)
        seen = cache.get_seq_length() if cache is not None else 0
        if visual and cache is not None and state is None:
            check_plain(cache)
        valid = self._valid(kwargs.get("attention_mask"), embeds, seen)
        if visual and state is None:
            cache, state = self._adopt(kwargs, seen)
        step = Step(self.owner, scope, state, seen, length)
        kwargs["attention_mask"] = None
        if visual and prompt is not None:
            valid = torch.ones(embeds.shape[:2], dtype=torch.bool) if valid is None else valid
            step.ids, step.layout = prompt, self.owner.family.layout(prompt, valid, scope.encoded)
            self._prefill(step, kwargs)
        else:
            self._continue(step, kwargs, valid)
        if state is not None:
            state.step = step
        return args, kwargs

    def _valid(self, mask: Any, embeds: Tensor, seen: int) -> Tensor | None:
        """``[B, q]`` bool of the new tokens, on the CPU, or None if none is padding; a single new token never is."""
        if mask is None or (seen and embeds.shape[1] == 1):
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise UnsupportedError("mmaccel needs the 2-D attention mask of the processor, not a prepared 4-D one.")
        new = mask[:, -embeds.shape[1] :].bool().cpu()
        return None if bool(new.all()) else new

    def _adopt(self, kwargs: dict[str, Any], seen: int) -> tuple[Any, CacheState | None]:
        cache, use = kwargs.get("past_key_values"), kwargs.get("use_cache")
        config = self.owner.family.text.config
        if cache is None:
            if not (config.use_cache if use is None else use):
                self.owner.check_cache(False)
                return None, None
            cache = kwargs["past_key_values"] = DynamicCache(config=config)
        mask = kwargs.get("attention_mask")
        return cache, adopt(cache, len(self.layers), mask[:, :seen].bool() if mask is not None and seen else None)

    def _continue(self, step: Step, kwargs: dict[str, Any], valid: Tensor | None) -> None:
        """New tokens without pictures on a reduced cache: all stay, positions follow the cache's offset."""
        state, embeds = step.state, kwargs["inputs_embeds"]
        assert state is not None
        device = embeds.device
        if state.offset is None:
            # adopted for a prompt that was refused, or reset
            state.offset = torch.zeros(len(embeds), dtype=torch.long, device=device)
        # from here on the cache is changed
        step.scope.step = step
        at = torch.arange(step.seen, step.seen + step.length, device=device)
        given = kwargs.get("position_ids")
        offset = state.offset.to(device)
        if state.ahead is not None and given is not None and given.dim() == 3:
            ahead = state.ahead.to(device)
            jumps = given[-1, :, 0].to(device) == step.seen - (offset - ahead)
            # decided on the device: the host would wait for the answer at every step
            offset, state.ahead = _settled(offset, ahead, jumps)
            state.offset = offset
        offset, chosen = offset[:, None], None
        if valid is None:
            places, padded = at.expand(len(embeds), -1), False
            positions = at - offset
        else:
            chosen = torch.arange(step.length).expand_as(valid).masked_fill(~valid, -1)
            valid = valid.to(device, non_blocking=True)
            places, padded = at.expand_as(valid).masked_fill(~valid, -1), True
            positions = (step.seen - offset + valid.cumsum(1) - 1).clamp(min=0)
            state.offset = state.offset + (~valid).sum(1).to(state.offset.device)
        step.phases.append((0, Phase(places.to(torch.int32), padded, chosen)))
        if given is not None and given.dim() == 3:
            positions = positions.expand(given.shape[0], -1, -1)
        kwargs["position_ids"] = positions

    def _prefill(self, step: Step, kwargs: dict[str, Any]) -> None:
        owner, scope, embeds = self.owner, step.scope, kwargs["inputs_embeds"]
        assert step.layout is not None
        visual, real = step.layout.visual, step.layout.valid
        batch, device = embeds.shape[0], embeds.device
        step.total = Reduction.identity(real)
        deepstack = kwargs.get("deepstack_visual_embeds")
        planes = _planes(kwargs["visual_pos_masks"], deepstack) if deepstack is not None else []
        with step.measured("selection", device):
            if (towers := owner.merging.at_the_door(step.layout, scope, embeds)) is not None:
                # the tokens hold their merged values already; DeepStack features were taken while groups were smaller
                merged, rest = towers
                planes = [merged.substitute(plane) for plane in planes]
                if rest is not None:
                    merged, embeds = merged.then(rest), rest.substitute(embeds)
                    planes = [rest.substitute(plane) for plane in planes]
                step.total = merged.beside(real & ~visual)
                step.trail.append(Passage(owner.encoder, 0, step.total))
            for number, (_, method) in enumerate(owner.built):
                if not isinstance(method, ProjectorMethod):
                    continue
                made = step.reduce(number, method, embeds, None)
                embeds = made.substitute(embeds)
                planes = [made.substitute(plane) for plane in planes]
        # from here on the cache is changed
        scope.step = step
        step.tell_apart(embeds)
        chosen, padded = step.compacted(step.total.kept)
        step.begin(0, chosen, padded, device)
        at = chosen.clamp(min=0)
        left = visual.gather(1, at) & (chosen >= 0)
        # the last token of a row decides where the next one stands
        last = (real * torch.arange(step.length)).argmax(1, keepdim=True)
        at, valid, rank, last, text, spots = _sent(
            device,
            at,
            real,
            (chosen >= 0).cumsum(1) - 1,
            last,
            ~visual.gather(1, last)[:, 0],
            left.flatten().nonzero()[:, 0],
        )
        valid, text = valid.bool(), text.bool()
        # where every token stays the caller's embeddings need no copy
        kwargs["inputs_embeds"] = embeds if at.shape[1] == step.length and not padded else _rows(embeds, at)
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(step.seen, step.seen + step.length, device=device).expand(batch, -1)
            if step.state is not None and step.state.offset is not None:
                # the cache may have seen padding, or forgotten places
                follows = step.seen - step.state.offset.to(device)
                positions = (follows[:, None] + valid.cumsum(1) - 1).clamp(min=0)
        positions = positions.to(device)
        if positions.shape[-2] == 1 and batch > 1:
            positions = positions.expand(*positions.shape[:-2], batch, -1)
        axes = positions[-3:] if positions.dim() == 3 else positions[None]
        furthest = axes.amax(0).masked_fill(~valid, -1).amax(1) + 1
        after = torch.where(text, axes[0].expand_as(valid).gather(1, last)[:, 0] + 1, furthest)
        ahead: Tensor | None = furthest - after
        kept_positions = positions[..., torch.arange(batch, device=device)[:, None], at]
        if owner.recipe.positions == "paper" and any(m.site in ("encoder", "projector") for _, m in owner.built):
            start = step.seen - step.state.offset.to(device) if step.state and step.state.offset is not None else 0
            kept_positions = (rank + (start[:, None] if isinstance(start, Tensor) else start)).clamp(min=0)
            after, ahead = kept_positions.amax(1) + 1, None
            if positions.dim() == 3:
                kept_positions = kept_positions.expand(positions.shape[0], -1, -1)
        kwargs["position_ids"] = kept_positions
        if step.state is not None:
            # asked once here, so that most calls need not look at it while they decode
            ahead = ahead if ahead is not None and positions.dim() == 3 and bool((ahead > 0).any()) else None
            step.state.offset, step.state.ahead = step.seen + step.length - after, ahead
            for cut in owner.cuts:
                step.state.split(cut)
        if planes:
            kwargs["visual_pos_masks"] = left.to(device, non_blocking=True)
            kwargs["deepstack_visual_embeds"] = [_rows(plane, at).flatten(0, 1)[spots] for plane in planes]
        scope.stats.layer_tokens = [int(left.sum())] * len(self.layers)

    # --- between layers ---------------------------------------------------------------------------------------
    def _layer(self, number: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            scope = current(self.owner)
            step = scope.step if scope is not None else None
            if scope is None or step is None or step.layout is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            if number in self.owner.cuts:
                with step.measured("selection", hidden.device):
                    hidden = self._cut(step, number, hidden, kwargs)
            extra = step.phase(number).extra
            kwargs = {**kwargs, **extra} if extra is not None else kwargs
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": hidden}

        return hook

    def _cut(self, step: Step, number: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Run the method at layer ``number``: the tokens it drops are gone from here on."""
        stage = self.owner.cuts[number]
        method = self.owner.built[stage][1]
        assert isinstance(method, LayerMethod) and step.total is not None and step.layout is not None
        _, phase = step.phases[-1]
        assert phase.chosen is not None
        slots = step.slots(phase.chosen)
        made = step.reduce(stage, method, hidden, slots)
        chosen, padded = step.compacted(made.kept)
        slots, places = _sent(hidden.device, slots, chosen.clamp(min=0))
        at = slots.gather(1, places)
        extra: dict[str, Any] = {}
        previous = {**kwargs, **(phase.extra or {})}
        if previous.get("position_embeddings") is not None:
            extra["position_embeddings"] = tuple(
                _rows(_batched(x, hidden), at) for x in previous["position_embeddings"]
            )
        if isinstance(previous.get("position_ids"), Tensor):
            positions = previous["position_ids"]
            extra["position_ids"] = positions.expand(len(hidden), -1).gather(1, at.to(positions.device))
        step.begin(number, chosen, padded, hidden.device, extra)
        tokens = step.scope.stats.layer_tokens
        left = int((made.kept & step.layout.visual).sum())
        tokens[number:] = [left] * (len(tokens) - number)
        if made.links is None:
            return _rows(hidden, at)
        # merged where the tokens stand in the prompt; what stands at places that are gone is not looked at
        return _rows(made.substitute(_rows(hidden, slots)), places)

    # --- out of the text model --------------------------------------------------------------------------------
    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Give the caller the length that was asked for, and settle the statistics."""
        scope = current(self.owner)
        if scope is None:
            return None
        step = scope.step
        if step is not None and step.eviction is not None and output is not None:
            device, waits = step.phase(0).places.device, bool(step.eviction.waiting)
            with step.measured("selection", device):
                step.eviction.settle()
            for number in range(len(self.layers) if waits else 0):
                step.pack(number, device)
        if step is not None and step.packing.waiting and output is not None:
            with step.measured("packing", step.phase(0).places.device):
                step.packing.settle()
        scope.step = None
        if scope.timer is not None:
            scope.stats.clock.stop(scope.timer[1], scope.timer[0])
            scope.timer = None
        if step is not None and step.state is not None:
            step.state.settle(whole=output is not None)
        if output is None:
            return None
        cache = getattr(output, "past_key_values", None)
        scope.cache = cache if cache is not None else scope.cache
        if step is not None and step.attended != len(self.layers):
            raise UnsupportedError(
                f"mmaccel saw the attention of {step.attended} of {len(self.layers)} layers, so this result is wrong: "
                "something replaced the attention function of the model (other kernels, a patched forward); undo that, or "
                "call model.mmaccel.remove() first."
            )
        if step is None or step.layout is None or step.total is None:
            return None
        scope.reduction = step.total
        scope.layout, scope.trail = step.layout, step.trail
        if step.eviction is not None and step.eviction.figures:
            self._record_cache(step, step.eviction.figures)
        if step.state is not None:
            for kind in self.owner.kinds:
                if kind.of != "salient":
                    self._record_codec(step, step.state, kind)
        if not scope.generating:
            output.last_hidden_state = self._widen(step, output.last_hidden_state)
        return output

    def _record_cache(self, step: Step, layers: list[Tensor]) -> None:
        assert self.owner.policy is not None
        stage = self.owner.policy
        record = step.scope.stats.stages.setdefault(stage, Stage("cache", self.owner.built[stage][1].name))
        figures = torch.stack(layers).double().mean(0).tolist()
        record.tokens_in += round(figures[0])
        record.resolved = (record.resolved or 0) + round(figures[1])
        record.tokens_kept += round(figures[2])
        policy = self.owner.built[stage][1]
        assert isinstance(policy, Policy)
        if policy.budget == "adaptive":
            step.scope.stats.notes.append(
                f"{policy.name} lets the content decide: of {figures[0]:g} keys a layer {figures[1]:g} were asked for, and "
                f"{figures[2]:g} stay"
            )
        if figures[2] == figures[0] and not policy.recalls and (policy.deferred or len(self.owner.built) > 1):
            why = "; it drops keys of tokens that a later layer dropped" if policy.deferred else ""
            step.scope.stats.notes.append(f"stage {stage} ({policy.name}) left all keys that reached it{why}")

    def _record_codec(self, step: Step, state: CacheState, kind: Kind) -> None:
        """A codec drops nothing: what it finds is what stays."""
        stats, codec = step.scope.stats, kind.codec
        record = stats.stages.setdefault(kind.stage, Stage("codec", codec.name, resolved=None))
        if kind.of != "text":
            before = [s.tokens_kept for s in stats.stages.values() if s.site == "cache"]
            record.tokens_in = record.tokens_kept = before[0] if before else stats.layer_tokens[-1]
        own = {other.number for other in self.owner.kinds if other.stage == kind.stage}
        if not any(width for layer in state.layers for n, width in enumerate(layer.widths) if n in own):
            what = f"{kind.of} tokens" if kind.of in ("text", "visual") else "tokens"
            stats.notes.append(
                f"{codec.name} has packed nothing: it packs {codec.page} {what} at a time, beyond the newest "
                f"{codec.residual}."
            )

    def _widen(self, step: Step, hidden: Tensor) -> Tensor:
        """Back to the caller's length: zero where there was no token, NaN where one was dropped.

        Where a head follows, its logits are given their NaN by :func:`show_dropped`: here it would reach the gradient of the
        head's weights.
        """
        chosen = step.phases[-1][1].chosen
        assert step.total is not None and chosen is not None
        dropped = step.total.valid & ~step.total.kept
        slots, kept, gone = _sent(hidden.device, step.slots(chosen), step.total.kept, dropped)
        wide = _rows(hidden, slots).masked_fill(~kept.bool()[..., None], 0.0)
        if step.scope.opened_by is self.owner.family.model:
            step.scope.dropped = gone.bool()
        else:
            wide = wide.masked_fill(gone.bool()[..., None], torch.nan)
        labels = step.scope.labels
        if labels is not None:
            # a row predicts the label behind it
            lost = torch.zeros_like(labels, dtype=torch.bool)
            lost[:, 1:] = dropped[:, :-1].to(labels.device)
            lost &= labels != -100
            step.scope.stats.labels_ignored += int(lost.sum())
            labels.masked_fill_(lost, -100)
        return wide


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """``x [B, S, D]`` at ``at [B, q]``."""
    return x.gather(1, at.to(x.device)[..., None].expand(-1, -1, x.shape[-1]))


def _batched(x: Tensor, like: Tensor) -> Tensor:
    return x.expand(len(like), -1, -1)


def _planes(mask: Tensor, deepstack: list[Tensor]) -> list[Tensor]:
    """DeepStack features ``[visual tokens, D]`` laid out over the sequence, ``[B, S, D]``."""
    planes = []
    for features in deepstack:
        plane = features.new_zeros(*mask.shape, features.shape[-1])
        planes.append(plane.masked_scatter(mask[..., None].to(plane.device), features))
    return planes


def show_dropped(logits: Tensor, dropped: Tensor, kept: int | Tensor) -> Tensor:
    """``logits [B, n, V]`` with NaN where a token was ``dropped [B, S]``.

    ``kept`` says which of the ``S`` places have logits, as ``logits_to_keep`` of transformers does.
    """
    rows = dropped[:, -kept or None :] if isinstance(kept, int) else dropped[:, kept.to(dropped.device)]
    fill = logits.masked_fill if logits.requires_grad else logits.masked_fill_
    return fill(rows.to(logits.device)[..., None], torch.nan)


def _settled(offset: Tensor, ahead: Tensor, jumps: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets ``[B]`` of a cache whose positions went on behind its frames in the rows that ``jumps``, and what is ahead from
    now on: nothing in any row, once one has jumped."""
    jumped = (jumps & (ahead > 0)).any()
    return torch.where(jumped & jumps, offset - ahead, offset), ahead.masked_fill(jumped, 0)


def _sent(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Whole numbers and masks from the CPU on a device, all of them long: one copy, which the host does not wait for."""
    flat = torch.cat([x.flatten().long() for x in tensors]).to(device, non_blocking=True)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def finish(scope: Scope) -> None:
    """What a call leaves behind in its statistics."""
    scope.stats.kv_bytes = cache_bytes(scope.cache) if scope.cache is not None else 0
