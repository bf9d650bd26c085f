"""The cache stage of a recipe: a policy scores, a budget is split, the rest is evicted or merged, when the schedule says.

At the end of a prompt a layer is compacted as soon as its attention has run, or, where the split needs the figures of all
layers, when the forward is over. While decoding it is compacted every ``every`` steps, or beyond ``cap`` keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.budget import Retain, resolve
from ..core.layout import Layout
from ..core.reduction import top_mask
from ..errors import MmaccelError
from ..kv import budgets
from ..kv.cache import CacheState, CompressedLayer
from ..kv.compact import merge
from ..kv.index import to_device
from ..kv.packed import QuantisedLayer
from ..kv.scoring.chunks import by_chunks
from ..kv.scoring.importance import behind_pictures, entropy, expected_queries, outgoing_norm, share_seen
from ..kv.sparse import SparseMemory, SparseRead
from ..method import KeyBatch, LayerAttention, Policy, plain_policy
from .forward import Forward, Prompt
from .plan import PlannedStage


@dataclass(frozen=True)
class Tokens:
    """The tokens of a forward that some layers see, for those of them on one device.

    places : ``[B, q]`` long, -1 for padding. visual : ``[B, q]`` bool.
    kinds : ``[B, q, 4]`` int32, picture and cell. count : see :class:`~mmaccel.method.KeyBatch`. question : see :func:`rank`.
    rivals, texts : how many tokens of each row compete for its budget, and how many are text; both known to the host.
    at : of every row the slots of those that compete, where the split over layers asks for their scores.
    memo : see :class:`~mmaccel.method.Layerwise`.
    """

    places: Tensor
    visual: Tensor
    kinds: Tensor
    count: Tensor
    question: Tensor | None
    rivals: list[int]
    texts: list[int]
    at: list[Tensor]
    memo: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Undecided:
    """A layer whose budget is settled when the forward is over, in proportion to ``seen [B]``, if that is known already."""

    number: int
    keys: KeyBatch
    tokens: Tokens
    seen: Tensor | None


@dataclass(frozen=True)
class Chosen:
    """A layer of which only the device knows how many keys stay.

    kept : ``[B, 1 or Hkv, q]`` bool, of all its new keys. won : ``[B, Hkv]`` long, how many of those that compete.
    there, resolved : how many compete, and their budget, summed over rows.
    """

    number: int
    scaling: float
    kept: Tensor
    won: Tensor
    there: int
    resolved: int


class Eviction:
    """What a recipe's policy does in one forward of the text model.

    A layer whose budget is known before it is scored is compacted at once, and nothing waits for the device. Where counts
    depend on the scores those of all layers are copied to the host together, when the forward is over.

    figures : per layer ``[3]`` float on the CPU: visual keys of this forward there were, resolved, and kept, summed over rows,
        mean over heads. With a joint budget, of all keys.
    """

    def __init__(self, forward: Forward, stage: PlannedStage[Policy], state: CacheState) -> None:
        self.forward, self.stage, self.state = forward, stage, state
        self.policy, self.retain = stage.method, stage.retain
        self.layout = forward.layout if isinstance(forward, Prompt) else None
        self.text_retain = forward.plan.recipe.text_retain
        self.official = forward.plan.recipe.rounding == "official"
        self.layers = len(state.layers)
        self.figures: list[Tensor] = []
        self.undecided: list[Undecided] = []
        self.chosen: list[Chosen] = []
        #: per layer ``[B, 1]`` long on the CPU, visual keys of this forward that stay in each head, where the host knows
        self.pictured: dict[int, Tensor] = {}
        #: ``[B, q, Hq D]`` or ``[B, q, Hq, D]``, the queries of the layer at work before RoPE, if the policy looks at them
        self.pre_rope: Tensor | None = None
        self._tokens: dict[tuple[int, torch.device], Tokens] = {}
        self._places: Tensor | None = None

    @property
    def waiting(self) -> bool:
        """Whether any layer waits for the end of the forward."""
        return bool(self.undecided or self.chosen)

    def after_attention(self, number: int, query: Tensor, key: Tensor, visible: Tensor | None, scaling: float) -> None:
        """``query [B, Hq, q, D]`` and ``key [B, Hkv, K, D]`` of layer ``number``, and who sees what ``[B, 1 or Hkv, q, K]``."""
        policy, layer = self.policy, self.state.layers[number]
        if policy.recalls:
            self._recall(number, query, key, visible, scaling)
            return
        if self.layout is None and not policy.scheduled:
            return
        if self.layout is not None:
            tokens = self.tokens(number, query.device)
            places, text, memo = tokens.places, (tokens.places >= 0) & ~tokens.visual, tokens.memo
        else:
            places = self.forward.phase(number).places.to(query.device).long()
            text, memo = places >= 0, {}
        attention = LayerAttention(query, key, visible, scaling, text, memo=memo)
        received = policy.observe(attention, layer.carried.figures(key)) if policy.observes else None
        if policy.scheduled:
            layer.carried.received = received
            if policy.window:
                layer.carried.remember(query, places, policy.window)
        if self.layout is not None:
            self._prompt(number, attention, tokens, received)
        else:
            self._decoded(layer, scaling)

    # --- at the end of a prompt -------------------------------------------------------------------------------
    def _prompt(self, number: int, attention: LayerAttention, tokens: Tokens, received: Tensor | None) -> None:
        policy, places = self.policy, tokens.places
        keys, values = self.state.layers[number].stored()
        new = places.shape[1]
        queries = attention.query[:, :, new - min(policy.window, new) :]
        split, _ = policy.choice("layer_budget")
        waits = policy.deferred or split not in ("uniform", "pyramid")
        kinds = tokens.kinds.long()
        batch = KeyBatch(
            keys=keys[:, :, -new:],
            values=values[:, :, -new:],
            queries=queries.clone() if waits else queries,
            places=places[:, new - queries.shape[2] :],
            valid=places >= 0,
            visual=tokens.visual,
            index=places,
            scaling=attention.scaling,
            received=None if received is None else received[..., -new:],
            count=tokens.count,
            picture=kinds[..., 0],
            cells=kinds[..., 1:],
            expected=self._expected(places, keys),
            outgoing=self._outgoing(number, values[:, :, -new:]),
            layer=number,
            depth=self.layers,
            memo=tokens.memo,
        )
        if waits:
            seen = None
            if split == "sparsity":
                seen = share_seen(attention, attention.once(behind_pictures), 0.01)
            elif split == "entropy":
                seen = entropy(attention).exp()
            self.undecided.append(Undecided(number, batch, tokens, seen))
        else:
            self._choose(batch, tokens, self._rank(batch, tokens), self._over_layers()[number])

    def settle(self) -> None:
        """The forward is over: compact the layers that waited for it."""
        undecided, self.undecided = self.undecided, []
        if undecided:
            step, scores = self.forward, []
            for one in undecided:
                if self.policy.deferred and isinstance(step, Prompt):
                    kept = step.total.kept.to(one.keys.index.device, non_blocking=True)
                    reach = kept.gather(1, (one.keys.index - step.seen).clamp(min=0)) & one.keys.valid
                    one.keys = replace(one.keys, survivors=reach)
                scores.append(self._rank(one.keys, one.tokens))
            counts = self._over_layers(undecided, scores)
            for score, count in zip(scores, counts, strict=True):
                # what a layer stored as a whole is free before the next one is compacted
                one = undecided.pop(0)
                self._choose(one.keys, one.tokens, score, count)
                del one
        chosen, self.chosen = self.chosen, []
        if chosen:
            home = chosen[0].kept.device
            found = [torch.cat([one.kept.sum(-1), one.won], dim=1).to(home) for one in chosen]
            for layer, lengths in zip(chosen, torch.stack(found).cpu(), strict=True):
                kept, won = lengths.split([layer.kept.shape[1], layer.won.shape[1]], dim=1)
                self._note(layer.there, layer.resolved, won.sum() / won.shape[1])
                self._cut(layer.number, layer.scaling, layer.kept, kept.clone())

    def _budget(self) -> list[int]:
        """Keys that stay in each row in the mean over layers: the budgets of its pictures, resolved on their original
        counts, summed; of all keys of the prompt where text and pictures share one budget."""
        layout = self.layout
        assert layout is not None
        if self.retain is None:
            return layout.visual.sum(1).tolist()
        if self.policy.joint:
            return [resolve(self.retain, n) for n in layout.valid.sum(1).tolist()]
        return visual_budget(layout, self.retain)

    def _rank(self, keys: KeyBatch, tokens: Tokens, by: Policy | None = None) -> Tensor:
        return rank(self.policy, keys, self.forward.seen == 0, tokens.question, by)

    def _over_layers(
        self, undecided: list[Undecided] | None = None, scores: list[Tensor] | None = None
    ) -> list[list[int]]:
        """Per layer and row: how many of the competing keys stay."""
        how, number = self.policy.choice("layer_budget")
        budget, layers = self._budget(), self.layers
        if how == "uniform":
            return [budget] * layers
        if how == "pyramid":
            layout = self.layout
            assert layout is not None and number is not None
            there = (layout.valid if self.policy.joint else layout.visual).sum(1).tolist()
            if self.official:
                # the program counts the window, which stays where all keys compete
                own = self.policy.window if self.policy.joint else 0
                rows = [budgets.pyramid_official(c, own, n, layers, number) for c, n in zip(budget, there, strict=True)]
            else:
                rows = [budgets.pyramid(c, [n] * layers, number) for c, n in zip(budget, there, strict=True)]
        else:
            assert undecided is not None and scores is not None
            rows = self._by_content(budget, undecided, scores)
        return [list(column) for column in zip(*rows, strict=True)]

    def _by_content(self, budget: list[int], undecided: list[Undecided], scores: list[Tensor]) -> list[list[int]]:
        """Per row: the keys of every layer."""
        how, number = self.policy.choice("layer_budget")
        home, rows = scores[0].device, []
        seen = [one.seen.to(home) for one in undecided if one.seen is not None]
        shares = torch.stack(seen, dim=1).tolist() if seen else [[1.0] * len(undecided)] * len(budget)
        for row, count in enumerate(budget):
            sizes = [one.tokens.rivals[row] for one in undecided]
            if how in ("sparsity", "entropy"):
                rows.append(budgets.by_shares(count, sizes, shares[row], number or 0.0))
                continue
            mine = [_proportions(s[row][:, one.tokens.at[row]]) for s, one in zip(scores, undecided, strict=True)]
            if how == "prefix":
                rows.append(budgets.prefix([s.mean(0).to(home) for s in mine], count))
                continue
            spread = [s.var(1, unbiased=False) if s.shape[1] else s.new_zeros(len(s)) for s in mine]
            ratios = budgets.variance_ratios(torch.stack([s.to(home) for s in spread]).double())
            rows.append(budgets.by_shares(count, sizes, ratios.tolist()))
        return rows

    def _choose(self, keys: KeyBatch, tokens: Tokens, scores: Tensor, count: list[int]) -> None:
        """Of one layer at the end of a prompt, choose what stays of the keys that are new."""
        policy = self.policy
        among = keys.valid if policy.joint else keys.valid & keys.visual
        kept = choose(policy, scores, among, to_device(torch.tensor(count), scores.device), self.official)
        won, lengths = kept.sum(-1), [min(c, n) for c, n in zip(count, tokens.rivals, strict=True)]
        # a stage before this one may have left fewer than the budget
        there, resolved = sum(tokens.rivals), sum(tokens.rivals if self.retain is None else lengths)
        certain = policy.budget == "exact" and policy.choice("head_budget")[0] == "uniform"
        if certain:
            self._note(there, resolved, sum(lengths))
        if not policy.joint:
            if certain:
                self.pictured[keys.layer] = torch.tensor(lengths)[:, None]
            wanted = tokens.texts
            text = (keys.valid & ~keys.visual)[:, None]
            if self.text_retain is not None:
                wanted = [resolve(self.text_retain, n) if n else 0 for n in tokens.texts]
                text = self._text(keys, tokens, scores, text[:, 0], wanted)
            kept = kept | text
            lengths = [a + min(b, n) for a, b, n in zip(lengths, wanted, tokens.texts, strict=True)]
        if policy.shared:
            kept = kept[:, :1]
        if certain:
            self._cut(keys.layer, keys.scaling, kept, torch.tensor(lengths)[:, None])
        else:
            self.chosen.append(Chosen(keys.layer, keys.scaling, kept, won, there, resolved))

    def _note(self, there: int, resolved: int, kept: Tensor | float) -> None:
        self.figures.append(torch.tensor([there, resolved, float(kept)]))

    def _cut(self, number: int, scaling: float, kept: Tensor, lengths: Tensor) -> None:
        """Compact one layer at the end of a prompt to what is ``kept [B, 1 or Hkv, q]`` of its new keys, ``lengths [B, 1 or
        Hkv]`` on the CPU; what earlier turns left there stays."""
        policy, layer = self.policy, self.state.layers[number]
        assert layer.index is not None
        old = len(layer.index) - kept.shape[2]
        if old:
            kept = torch.cat([kept.new_ones(*kept.shape[:2], old), kept], dim=-1)
            lengths = lengths + layer.index.lengths - self.forward.phase(number).lengths[:, None]
        self._compact(layer, kept, old, lengths)
        if policy.scheduled:
            layer.carried.capacity = self._lengths(layer)
            layer.carried.settled = layer.seen
        if policy.cap:
            self._shrink(layer, scaling)

    def _text(self, keys: KeyBatch, tokens: Tokens, scores: Tensor, text: Tensor, wanted: list[int]) -> Tensor:
        if self.policy.text_policy:
            scores = self._rank(keys, tokens, plain_policy(self.policy.text_policy))
        return per_head(scores, text, to_device(torch.tensor(wanted), scores.device))

    def _compact(self, layer: QuantisedLayer, kept: Tensor, old: int = 0, lengths: Tensor | None = None) -> None:
        """Evict, or merge, what is not ``kept [B, Hkv or 1, K]``; the first ``old`` slots take no part in a merge, nor do
        keys that were packed: they would be quantised again. For ``lengths`` see :meth:`.cache.CompressedLayer.evict`."""
        how, decay = self.policy.choice("compact")
        layer.carried.compacted = layer.seen
        assert layer.index is not None
        if how == "evict":
            layer.evict(kept, lengths=lengths)
            return
        keys, values = layer.stored()
        there = ((layer.index.by_head >= 0) & ~layer.once()).expand(keys.shape[:3]).clone()
        there[..., :old] = False
        stay = kept.expand(keys.shape[:3]) & there
        made = merge(
            how,
            keys,
            values,
            stay,
            there & ~stay,
            decay=decay or 0.0,
            threshold=layer.carried.threshold,
            by_rank=self.official,
            few=lengths is None,
        )
        if self.policy.scheduled:
            layer.carried.threshold = made.threshold
        layer.evict(kept, (made.keys, made.values), lengths)

    # --- while decoding ---------------------------------------------------------------------------------------
    def _decoded(self, layer: QuantisedLayer, scaling: float) -> None:
        """Compact a layer that holds more than it may, when it is time."""
        carried = layer.carried
        if carried.capacity is None:
            carried.capacity, carried.settled = self._lengths(layer), layer.seen
        if layer.seen - carried.compacted >= self.policy.every:
            self._shrink(layer, scaling)

    def _shrink(self, layer: QuantisedLayer, scaling: float) -> None:
        """Of all that a layer stores, from whichever turn, keep the best that it may hold."""
        policy, carried = self.policy, layer.carried
        assert layer.index is not None and carried.capacity is not None
        if policy.cap and len(layer.index) <= policy.cap:
            return
        room = torch.full_like(carried.capacity, policy.cap) if policy.cap else carried.capacity
        room = room + int(policy.growth * (layer.seen - carried.settled))
        if bool((self._lengths(layer) <= room).all()):
            return
        batch, order = self._stored(layer, scaling)
        among = batch.valid if policy.joint or self.text_retain is not None else batch.visual & batch.valid
        fixed = batch.valid & ~among
        heads = len(batch.valid) // len(room)
        wanted = to_device((room if heads > 1 else room[:, :1]).reshape(-1), fixed.device)
        wanted = (wanted - fixed.sum(1)).clamp(min=0)
        batch = replace(batch, count=wanted)
        question = self._question(wanted.device)
        scores = rank(policy, batch, True, None if question is None else question.repeat_interleave(heads, dim=0))
        kept = per_head(scores, among, wanted) | fixed[:, None]
        kept = kept[:, 0] if policy.shared or heads > 1 else kept
        if kept.dim() == 2:
            slots = torch.zeros_like(kept).scatter_(1, order, kept)
            kept = slots.unflatten(0, (-1, heads))
        else:
            kept = torch.zeros_like(kept).scatter_(2, order[:, None].expand_as(kept), kept)
        self._compact(layer, kept)

    def _stored(self, layer: CompressedLayer, scaling: float) -> tuple[KeyBatch, Tensor]:
        """All that a layer stores, padding in front, and the slot of each key ``[rows, K]``; where heads differ every
        (row, head) is a row."""
        assert layer.index is not None
        keys, values = layer.stored()
        carried, index = layer.carried, layer.index.index.long()
        queries, asked, received = carried.queries, carried.places, carried.received
        queries = keys.new_zeros(len(keys), keys.shape[1], 0, keys.shape[3]) if queries is None else queries
        outgoing, heads = self._outgoing(layer.number, values), 1
        if index.dim() == 3:
            heads = index.shape[1]
            index, keys, values = index.flatten(0, 1), keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
            queries = queries.unflatten(1, (heads, -1)).flatten(0, 1)
            received, outgoing = (None if x is None else x.flatten(0, 1)[:, None] for x in (received, outgoing))
        # by place: packed pictures stand before text that is older
        order = index.argsort(dim=1, stable=True)
        index = index.gather(1, order)

        def sorted_(x: Tensor) -> Tensor:
            at = order[:, None].expand(x.shape[:3])
            return x.gather(2, at if x.dim() == 3 else at[..., None].expand_as(x))

        picture, cells = self._kinds(index, heads)
        batch = KeyBatch(
            keys=sorted_(keys),
            values=sorted_(values),
            queries=queries,
            places=index[:, :0] if asked is None else asked.repeat_interleave(heads, dim=0),
            valid=index >= 0,
            visual=picture >= 0,
            index=index,
            scaling=scaling,
            received=None if received is None else sorted_(received),
            picture=picture,
            cells=cells,
            outgoing=None if outgoing is None else sorted_(outgoing),
            layer=layer.number,
            depth=self.layers,
            decoding=True,
        )
        return batch, order

    # --- reading some keys at every step ----------------------------------------------------------------------
    def _recall(self, number: int, query: Tensor, key: Tensor, visible: Tensor | None, scaling: float) -> None:
        """At a prompt note what there is; at a decode step choose what the layers from ``layer`` on read."""
        state, layer = self.state, self.state.layers[number]
        if self.layout is not None:
            tokens, budget = self.tokens(number, query.device), self._budget()
            pictured = sum(tokens.rivals)
            self._note(pictured, sum(budget), pictured)
            if number == 0:
                state.kinds = to_device(self._table(), query.device)
                state.recall = SparseMemory(tokens.count if state.recall is None else state.recall.count + tokens.count)
            return
        first = policy_layer(self.policy, self.layers)
        if number != first - 1 or query.shape[2] > 1 or state.recall is None or state.kinds is None:
            return
        assert layer.index is not None
        text = torch.ones(len(query), 1, dtype=torch.bool, device=query.device)
        paid = (
            LayerAttention(query, key, visible, scaling, text).attention(0, 1)[:, :, 0].unflatten(1, (key.shape[1], -1))
        )
        index = layer.index.by_head.long()
        # heads that store the same keys have one index
        paid = paid.mean((1, 2))[:, None] if index.shape[1] == 1 else paid.mean(2) / key.shape[1]
        kinds, end = state.kinds.to(query.device), state.kinds.shape[1]
        there = (index >= 0) & (index < end)
        shape = (len(query), index.shape[1], end + 1)
        by_place = paid.new_zeros(shape).scatter_(2, torch.where(there, index, end), paid).sum(1)[:, :end]
        visual = (kinds[..., 0] >= 0) & there.new_zeros(shape).scatter_(2, torch.where(there, index, end), True).any(1)[
            :, :end
        ]
        memory = state.recall = state.recall.to(query.device)
        chosen = self.policy.recall(by_place, memory.paid, visual, memory.count, memory.chosen) & visual
        memory.paid, memory.chosen = by_place, chosen
        self.forward.incoming.sparse = SparseRead(first, chosen | ~visual)

    # --- what is where ----------------------------------------------------------------------------------------
    def _lengths(self, layer: CompressedLayer) -> Tensor:
        """``[B, Hkv]`` long on the CPU: keys each head stores."""
        assert layer.index is not None
        return layer.index.lengths.expand(-1, layer.keys.shape[1]).contiguous()

    def tokens(self, number: int, device: torch.device) -> Tokens:
        """The tokens of a prompt that layer ``number`` sees: worked out on the host, once for all layers on ``device`` that see
        the same."""
        phase, layout = self.forward.phase(number), self.layout
        assert layout is not None and phase.chosen is not None
        if (id(phase), device) not in self._tokens:
            valid = phase.chosen >= 0
            visual = layout.visual.gather(1, phase.chosen.clamp(min=0)) & valid
            places = torch.where(valid, phase.chosen + self.forward.seen, -1)
            table = self._table()
            kinds = table.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, 4)).masked_fill(~valid[..., None], -1)
            rivals = valid if self.policy.joint else visual
            told = to_device(torch.cat([places[..., None], visual[..., None], kinds], dim=-1), device)
            by_score = self.policy.choice("layer_budget")[0] in ("prefix", "variance")
            self._tokens[id(phase), device] = Tokens(
                # what all layers share is kept small
                places=told[..., 0].clone(),
                visual=told[..., 1].bool(),
                kinds=told[..., 2:].int(),
                count=to_device(torch.tensor(self._budget()), device),
                question=self._question(device),
                rivals=rivals.sum(1).tolist(),
                texts=(valid & ~visual).sum(1).tolist(),
                at=[to_device(row.nonzero()[:, 0], device) for row in rivals] if by_score else [],
            )
        return self._tokens[id(phase), device]

    def _expected(self, places: Tensor, keys: Tensor) -> tuple[Tensor, Tensor] | None:
        """What the queries behind those at ``places [B, q]`` may be, if the policy looks into the future."""
        policy, state, queries = self.policy, self.state, self.pre_rope
        if not policy.future or queries is None:
            return None
        self.pre_rope = None
        there = places >= 0
        text, position = self.forward.plan.family.text, torch.arange(policy.future, device=keys.device)
        assert state.offset is not None
        position = (self.forward.seen + self.forward.length - state.offset.to(keys.device))[:, None] + position
        if "mrope_section" in (text.config.rope_parameters or {}):
            position = position.expand(3, -1, -1)
        # in full precision, as half precision does not tell late positions apart
        cos, sin = (x[0] if x.dim() == 4 else x for x in text.rotary_emb(keys[..., :0].float(), position))
        queries = queries.flatten(2).unflatten(2, (-1, keys.shape[3]))
        counted = there & (there.cumsum(1) > policy.sinks)
        return expected_queries(queries, counted, cos.to(keys.device), sin.to(keys.device))

    def _outgoing(self, number: int, values: Tensor) -> Tensor | None:
        """Norms of ``values [B, Hkv, K, D]`` behind the output projection of layer ``number``, if the policy looks at them."""
        if not self.policy.needs_outgoing:
            return None
        weight: Tensor = self.forward.plan.family.text.layers[number].self_attn.o_proj.weight
        return outgoing_norm(values, weight.detach().unflatten(1, (-1, values.shape[3])))

    def _kinds(self, places: Tensor, heads: int = 1) -> tuple[Tensor, Tensor]:
        """Picture ``[rows, K]`` and cell ``[rows, K, 3]`` of any places, ``heads`` rows for every row of the batch."""
        table = to_device(self._table(), places.device)
        known = (places >= 0) & (places < table.shape[1])
        rows = (torch.arange(len(places), device=places.device) // heads)[:, None]
        kinds = table[rows, places.clamp(0, table.shape[1] - 1)].long().masked_fill(~known[..., None], -1)
        return kinds[..., 0], kinds[..., 1:]

    def _table(self) -> Tensor:
        """``[B, n, 4]`` int32 (picture, t, row, column) of all places up to the end of the last prompt; in a prompt on the
        CPU."""
        step, state = self.forward, self.state
        if self.layout is None:
            assert state.layers[0].index is not None
            index = state.layers[0].index.index
            return state.kinds if state.kinds is not None else index.new_full((len(index), 1, 4), -1)
        if self._places is None:
            batch, end = len(self.layout.valid), step.seen + step.length
            table = torch.full((batch, end, 4), -1, dtype=torch.int32)
            if state.kinds is not None:
                table[:, : state.kinds.shape[1]] = state.kinds.cpu()
            picture, frame = int(table[..., 0].max()) + 1, 0
            if state.stream:
                picture, frame = 0, int(table[..., 1].max()) + 1
            for segment in self.layout.segments:
                cells = segment.tile.cells.to(torch.int32)
                at = segment.places + step.seen
                table[segment.row, at, 0] = picture if state.stream else picture + segment.picture
                table[segment.row, at, 1:] = torch.where(cells < 0, cells, cells + cells.new_tensor([frame, 0, 0]))
            self._places = table
            if self.policy.scheduled:
                state.kinds = to_device(table, step.phase(0).places.device)
        return self._places

    def _question(self, device: torch.device) -> Tensor | None:
        """``[B, 2]`` long, if it is protected: the text behind the last picture begins, and ends, at these places."""
        if "question" not in self.policy.protect:
            return None
        pictures = self._table()[..., 0] >= 0
        end = pictures.shape[1]
        last = torch.where(pictures, torch.arange(end, device=pictures.device), -1).amax(1)
        return to_device(torch.stack([last + 1, torch.full_like(last, end)], dim=1), device)


# --- choosing ---------------------------------------------------------------------------------------------------------
def rank(
    policy: Policy, keys: KeyBatch, start: bool = True, question: Tensor | None = None, by: Policy | None = None
) -> Tensor:
    """The policy's scores ``[B, Hkv, K]`` with those of protected keys infinite and those of padding lowest.

    Parameters
    ----------
    start : whether the first of these keys are the first of the sequence, so that ``sinks`` means them.
    question : ``[B, 2]`` long, the places between which ``protect=("question",)`` protects text.
    by : another policy that scores; what is protected is that of ``policy``.
    """
    scores = (by or policy).score(keys)
    if scores.shape != keys.keys.shape[:3]:
        raise MmaccelError(
            f"Method {policy.name!r} returned scores of shape {tuple(scores.shape)} where rows, key heads and keys are "
            f"{tuple(keys.keys.shape[:3])}."
        )
    if policy.chunk:
        scores = by_chunks(scores, keys, policy.chunk)
    must = protected(policy, keys, start, question)
    return scores.masked_fill(must[:, None], torch.inf).masked_fill(~keys.valid[:, None], -torch.inf)


def protected(policy: Policy, keys: KeyBatch, start: bool = True, question: Tensor | None = None) -> Tensor:
    """``[B, K]`` bool: sinks, recent keys, and the kinds that the recipe protects."""
    valid = keys.valid
    must = torch.zeros_like(valid)
    if policy.sinks and start:
        must |= valid.cumsum(1) <= policy.sinks
    if policy.recent:
        there = valid.sum(1, keepdim=True)
        newest = policy.recent if isinstance(policy.recent, int) else (there * policy.recent + 0.5).long()
        must |= valid.flip(1).cumsum(1).flip(1) <= newest
    if "separators" in policy.protect and keys.cells is not None:
        must |= keys.visual & (keys.cells[..., 0] < 0)
    if "question" in policy.protect and question is not None:
        at = question.to(keys.index.device)
        must |= ~keys.visual & (keys.index >= at[:, :1]) & (keys.index < at[:, 1:])
    return must & valid


def choose(policy: Policy, scores: Tensor, among: Tensor, count: Tensor, official: bool = False) -> Tensor:
    """``[B, Hkv, K]`` bool: what stays of the keys ``among [B, K]``, ``count [B]`` in the mean over heads.

    A policy whose budget is not exact drops what it scores ``-inf``; without a budget it drops nothing else.
    """
    how, floor = policy.choice("head_budget")
    if policy.budget == "none":
        kept = among[:, None].expand_as(scores)
    elif how == "uniform":
        kept = per_head(scores, among, count)
    else:
        assert floor is not None
        if how == "safeguard":
            kept = budgets.safeguard(scores, among, count, floor)
        else:
            rivals = budgets.concentrated(scores, among, count) if how == "concentrated" else scores
            kept = per_head(scores, among, budgets.adaptive(rivals, among, count, floor, official))
    return kept if policy.budget == "exact" else kept & (scores > -torch.inf)


def per_head(scores: Tensor, of: Tensor, count: Tensor) -> Tensor:
    """``[B, Hkv, K]`` bool: the best keys among ``of [B, K]`` of every head, ``count [B]`` or ``[B, Hkv]``."""
    heads = scores.shape[1]
    wanted = count.flatten() if count.dim() == 2 else count.repeat_interleave(heads)
    return top_mask(scores.flatten(0, 1), of.repeat_interleave(heads, dim=0), wanted).view_as(scores)


def visual_budget(layout: Layout, retain: Retain) -> list[int]:
    """Visual keys that stay in each row: the budgets of its pictures, resolved on their original counts, summed."""
    sizes: dict[tuple[int, int], int] = {}
    for segment in layout.segments:
        key = (segment.row, segment.picture)
        sizes[key] = sizes.get(key, 0) + len(segment.places)
    out = [0] * len(layout.valid)
    for (row, _), size in sizes.items():
        out[row] += resolve(retain, size)
    return out


def policy_layer(policy: Policy, depth: int) -> int:
    """The layer from which on a policy works, a number or a share of the depth; at least 1."""
    layer = getattr(policy, "layer", 1)
    return min(max(1, layer if isinstance(layer, int) else int(layer * depth + 0.5)), depth)


def _proportions(scores: Tensor) -> Tensor:
    """Scores ``[H, n]`` as shares that are not negative; what must stay counts as the best of the rest."""
    if not scores.shape[1]:
        # a row without pictures
        return scores
    finite = scores.isfinite()
    most = scores.masked_fill(~finite, -torch.inf).amax(1, keepdim=True).nan_to_num(1.0, 1.0, 1.0)
    scores = torch.where(scores == torch.inf, most, scores)
    least = scores.masked_fill(~scores.isfinite(), torch.inf).amin(1, keepdim=True).clamp(max=0.0)
    return (scores - least).nan_to_num(0.0, 0.0, 0.0)
