"""Eviction at the end of a prompt: the best keys of every layer stay, the rest is evicted or merged.

On a GPU some layers wait for each other and are evicted from together, as rows of one batch: what is done with a prompt of some
hundred tokens costs less than starting it. Layers wait while the keys and values of those that do take up :data:`BYTES` at
most: what is held grows by less than that, whatever the prompt, .2 % of the weights of a model of 7B. What is made of their
keys to score them is there before the MLP of the last one begins, whose activations mostly take more; in a model where they do
not the peak grew by twice the bytes that may wait (``tests/test_memory.py``). Of a prompt of a thousand tokens half of the
layers of a model of 7B fit in if it has 4 KV heads, and two if it has 32; of one of 32 thousand none, and each layer is evicted
from before the next one is stored. On a CPU, where nothing is started, that is always so. Where budgets depend on the content
all layers wait for the end of the forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...core.budget import resolve
from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.layer_batch import Asking, InStep, LayerBatch, batches, size
from ...kv.packed import QuantisedLayer
from ...kv.scoring.importance import behind_pictures, entropy, expected_queries, mean_rotation, share_seen
from ...kv.select import choose, per_head, rank, scored
from ...method import KeyBatch, LayerAttention, Policy
from ..call.forward import Prompt, chosen_of
from ..prompt.preview import TextBehind
from .layer_budgets import KNOWN, Waiting, by_content, known, prompt_budget
from .rules import CacheRules
from .schedule import Schedule
from .sparse_read import note_prompt
from .token_origins import Tokens, prompt_grid, question_span

#: bytes of keys and values of the layers that wait for each other on a GPU, at most
BYTES = 1 << 25


@dataclass(frozen=True)
class Chosen:
    """Layers of which only the device knows how many keys stay.

    kept : ``[R, 1 or Hkv, q]`` bool, of all their new keys. won : ``[R, Hkv]`` long, how many of those that compete.
    there, resolved : per layer how many compete, and their budget, summed over rows.
    """

    layers: list[QuantisedLayer]
    kept: Tensor
    won: Tensor
    there: int
    resolved: list[int]


class PromptEviction:
    """Eviction at the end of a prompt with pictures.

    Where budgets are known before layers are scored nothing waits for the device. Where counts depend on the scores those of
    all layers are copied to the host together, when the forward is over.

    figures : per layer ``[3]`` float on the CPU: visual keys of this forward there were, resolved, and kept, summed over rows,
        mean over heads. With a joint budget, of all keys.
    pictured : per layer ``[B, 1]`` long on the CPU, visual keys of this forward that stay in each head, where the host knows.
    done : layers that were evicted from since this was last emptied.
    """

    def __init__(self, stage: CacheRules, state: CacheState, prompt: Prompt, schedule: Schedule) -> None:
        self.stage, self.policy, self.state = stage, stage.policy, state
        self.prompt, self.layout, self.schedule = prompt, prompt.layout, schedule
        #: rows that have no picture in this prompt, of which nothing is evicted here
        self.text_rows = prompt.text_rows
        self.split = self.policy.choice("layer_budget")[0]
        #: whether all layers wait for the end of the forward
        self.late = self.policy.deferred or prompt.plan.draft_policy is not None or self.split not in KNOWN
        #: the text that a draft has written, for policies that score by it
        self.behind: TextBehind | None = None
        self.figures: list[Tensor] = []
        self.pictured: dict[int, Tensor] = {}
        self.done: list[int] = []
        self.waiting: dict[int, Waiting] = {}
        self.chosen: list[Chosen] = []
        self.cuts = InStep()
        self._tokens: dict[tuple[int, torch.device], Tokens] = {}

    def note(self, number: int, device: torch.device) -> None:
        """Drop nothing, but note what there is for steps that read some of it."""
        tokens = self.tokens(number, device)
        there = sum(tokens.rivals)
        self._note(there, sum(self.budget), there)
        if number == 0:
            note_prompt(self.state.shared, to_device(self.table, device), tokens.count, self.text_rows)

    @property
    def looks(self) -> bool:
        """Whether anything is made of the attention of every layer, which takes time worth measuring."""
        return self.policy.observes or self.policy.future > 0 or self.split in ("sparsity", "entropy")

    def after_attention(
        self,
        number: int,
        attention: LayerAttention,
        tokens: Tokens,
        received: Tensor | None,
        expected: tuple[Tensor, Tensor] | None,
    ) -> None:
        """The attention of a layer has run: note what is needed of it to choose.

        Parameters
        ----------
        received : ``[B, Hkv, K]`` float32, see :meth:`mmaccel.method.Policy.observe`. expected : see
            :class:`~mmaccel.method.KeyBatch`.
        """
        # those of a whole prompt are large
        window, seen = min(self.policy.window, tokens.places.shape[1]), None
        rows, heads, _, channels = attention.query.shape
        last = attention.query.new_empty(rows, heads, window, channels)
        if window:
            last.copy_(attention.query[:, :, -window:])
        if self.split == "sparsity":
            seen = share_seen(attention, attention.once(behind_pictures), 0.01)
        elif self.split == "entropy":
            seen = entropy(attention).exp()
        self.waiting[number] = Waiting(
            layer=self.state.layers[number],
            tokens=tokens,
            queries=last,
            scaling=attention.scaling,
            received=None if received is None else received[..., -tokens.places.shape[1] :],
            expected=expected,
            seen=seen,
        )

    def flush_if_full(self) -> None:
        """Evict from the layers that wait if they are as many as may."""
        sizes = [size(one.layer) for one in self.waiting.values()]
        # one more may be as large as the last one
        if not self.late and sum(sizes) + sizes[-1] > self.room:
            self._evict_timed(list(self.waiting))

    def finalize(self) -> None:
        """The forward is over: evict from the layers that waited for it."""
        if self.waiting:
            self._evict_timed(None if self.late else list(self.waiting))
        chosen, self.chosen = self.chosen, []
        if chosen:
            home = chosen[0].kept.device
            with self.prompt.measured("selection", home):
                found = [torch.cat([one.kept.sum(-1), one.won], dim=1).to(home) for one in chosen]
                # layers may have different numbers of heads
                lengths = torch.cat([x.flatten() for x in found]).cpu().split([x.numel() for x in found])
                for one, mine, like in zip(chosen, lengths, found, strict=True):
                    self._settle(one, mine.view(like.shape))
                self.cuts.finish()

    # --- choosing ---------------------------------------------------------------------------------------------
    @property
    def room(self) -> int:
        """Bytes that layers may hold while they wait for each other."""
        return 0 if next(iter(self.waiting.values())).layer.keys.device.type == "cpu" else BYTES

    @property
    def pictured_rows(self) -> Tensor:
        """``[B]`` bool on the CPU, the other rows."""
        return self.layout.visual.any(1)

    @cached_property
    def budget(self) -> list[int]:
        """Per row, see :func:`.layer_budgets.prompt_budget`."""
        return prompt_budget(self.stage, self.layout, self.prompt.stats.notes)

    def layer_budgets(self) -> list[list[int]]:
        """Per layer and row: how many of the competing keys stay, where that does not depend on the content."""
        return known(self.stage, self.layout, self.budget)

    def _evict_timed(self, layers: list[int] | None) -> None:
        device = next(iter(self.waiting.values())).layer.keys.device
        with self.prompt.measured("selection", device, layers):
            self._evict()

    def _evict(self) -> None:
        """Choose what stays of the layers that wait."""
        groups = list(batches([one.layer for one in self.waiting.values()], self._kind, self.room))
        scores: list[Tensor | None] = [None] * len(groups)
        if self.split in KNOWN:
            counts = dict(enumerate(self.layer_budgets()))
        else:
            counts, scores = self._by_content(groups)
        while groups:
            # what layers stored as a whole is free before the next ones are evicted from
            together, ranked = groups.pop(0), scores.pop(0)
            keys, tokens = self._batch(together)
            if ranked is None:
                ranked = self._ranked(together, keys, tokens)
            self._choose(together, keys, tokens, ranked, [counts[layer.number] for layer in together.layers])
            for layer in together.layers:
                del self.waiting[layer.number]
            del together, keys
        self.cuts.finish()

    def _by_content(self, groups: list[LayerBatch]) -> tuple[dict[int, list[int]], list[Tensor | None]]:
        """Per layer and row how many of the competing keys stay; and the scores of every group, ``[R, Hkv, K]``."""
        scores: list[Tensor | None] = []
        layers, each, raw = [], [], []
        for group in groups:
            # what it joins is free before the next one is ranked
            together = LayerBatch(group.layers)
            keys, tokens = self._batch(together)
            found = self._ranked(together, keys, tokens)
            scores.append(found)
            layers += [self.waiting[layer.number] for layer in group.layers]
            each += found.split(group.rows)
            if self.policy.official and self.split == "prefix":
                raw += self._score(together, keys).split(group.rows)
        counts = by_content(self.stage, self.budget, layers, each, raw)
        return {one.layer.number: count for one, count in zip(layers, counts, strict=True)}, scores

    def _kind(self, layer: QuantisedLayer) -> Hashable:
        """What must be the same in layers that are rows of one batch."""
        one = self.waiting[layer.number]
        return id(one.tokens), len(layer.index), one.scaling

    def _batch(self, together: LayerBatch) -> tuple[KeyBatch, Tokens]:
        """The keys of a prompt in some layers, and their tokens; the rows are those of one layer after the other."""
        ones = [self.waiting[layer.number] for layer in together.layers]
        tokens = ones[0].tokens.of_layers(len(ones))
        places, grid = tokens.places, tokens.grid.long()
        keys, values = (x[:, :, -places.shape[1] :] for x in together.stored)
        queries, valid, survivors = joined([one.queries for one in ones]), places >= 0, None
        if self.policy.deferred:
            kept = to_device(self.prompt.total.kept, places.device).repeat(len(ones), 1)
            survivors = kept.gather(1, (places - self.prompt.seen).clamp(min=0)) & valid
        outgoing = None
        if self.policy.needs_outgoing:
            parts = zip(together.layers, values.split(together.rows), strict=True)
            norms = [self.stage.outgoing(layer.number, part) for layer, part in parts]
            outgoing = joined([x for x in norms if x is not None])
        expected = [one.expected for one in ones if one.expected is not None]
        batch = KeyBatch(
            keys=keys,
            values=values,
            queries=queries,
            places=places[:, places.shape[1] - queries.shape[2] :],
            valid=valid,
            visual=tokens.visual,
            index=places,
            scaling=ones[0].scaling,
            received=joined([one.received for one in ones if one.received is not None])
            if self.policy.observes
            else None,
            count=tokens.count,
            picture=grid[..., 0],
            cells=grid[..., 1:],
            survivors=survivors,
            expected=(joined([m for m, _ in expected]), joined([c for _, c in expected])) if expected else None,
            outgoing=outgoing,
            ordinal=self.state.shared.ordinal(places) if self.policy.needs_ordinals else None,
            layer=together.layers[0].number if len(ones) == 1 else -1,
            depth=self.stage.depth,
            memo=tokens.memo,
        )
        return batch, tokens

    def _ranked(self, together: LayerBatch, keys: KeyBatch, tokens: Tokens, by: Policy | None = None) -> Tensor:
        """The scores ``[R, Hkv, K]`` of ``keys``, those of ``together``, by the policy or another one."""
        policy = by or self.policy
        if policy.by_layer and len(together.layers) > 1:
            scores = torch.cat([scored(policy, self._batch(LayerBatch([layer]))[0]) for layer in together.layers])
        else:
            scores = self._score(together, keys) if by is None else scored(by, keys)
        return self._rank(keys, tokens, scores)

    def _score(self, together: LayerBatch, keys: KeyBatch) -> Tensor:
        """What the policy says of ``keys``, those of ``together``, ``[R, Hkv, K]``."""
        if self.behind is None:
            return scored(self.policy, keys)
        return scored(self.policy, _followed(keys, self.behind, together))[..., : keys.keys.shape[2]]

    def _rank(self, keys: KeyBatch, tokens: Tokens, scores: Tensor | None = None) -> Tensor:
        return rank(self.policy, keys, self.prompt.seen == 0, tokens.question, scores)

    def _choose(
        self, together: LayerBatch, keys: KeyBatch, tokens: Tokens, scores: Tensor, counts: Sequence[list[int]]
    ) -> None:
        """Of layers at the end of a prompt, choose what stays of the keys that are new, ``counts`` per layer and row."""
        policy, rows = self.policy, together.rows
        among = keys.valid if policy.joint else keys.valid & keys.visual
        whole = None if self.text_rows is None else self.text_rows.repeat(len(together.layers))
        count = torch.tensor(counts).flatten()
        if policy.joint and whole is not None:
            among, count = among & ~to_device(whole, among.device)[:, None], count.masked_fill(whole, 0)
        kept = choose(policy, scores, among, to_device(count, scores.device))
        # a stage before this one may have left fewer than the budget
        lengths = count.minimum(torch.tensor(tokens.rivals))
        there, wins = sum(tokens.rivals[:rows]), lengths.view(-1, rows).sum(1).tolist()
        resolved = wins if self.stage.retain is not None else [there] * len(wins)
        won, certain = kept, policy.budget == "exact" and policy.choice("head_budget")[0] == "uniform"
        if not policy.joint:
            if certain:
                mine = zip(together.layers, lengths[:, None].split(rows), strict=True)
                self.pictured.update((layer.number, length) for layer, length in mine)
            wanted = torch.tensor(tokens.texts)
            text = tokens.text[:, None]
            if self.stage.text_retain is not None:
                wanted = torch.tensor([resolve(self.stage.text_retain, n) if n else 0 for n in tokens.texts])
                wanted = wanted if whole is None else torch.where(whole, torch.tensor(tokens.texts), wanted)
                text = self._text(together, keys, tokens, scores, wanted)
            kept = kept | text
            lengths = lengths + wanted.minimum(torch.tensor(tokens.texts))
        elif whole is not None:
            kept = kept | (tokens.text & to_device(whole, kept.device)[:, None])[:, None]
            lengths = torch.where(whole, torch.tensor(tokens.texts), lengths)
        if policy.shared:
            kept = kept[:, :1]
        if certain:
            for wanted_here, stays in zip(resolved, wins, strict=True):
                self._note(there, wanted_here, stays)
            self._cut(together, kept, lengths[:, None])
        else:
            self.chosen.append(Chosen(together.layers, kept, won.sum(-1), there, resolved))

    def _settle(self, chosen: Chosen, lengths: Tensor) -> None:
        """Evict from layers of which the host knows now how many keys stay and won, ``lengths [R, heads]`` on the CPU."""
        together, kept = LayerBatch(chosen.layers), chosen.kept
        stay, won = lengths.split([kept.shape[1], lengths.shape[1] - kept.shape[1]], dim=1)
        for resolved, mine in zip(chosen.resolved, won.split(together.rows), strict=True):
            self._note(chosen.there, resolved, mine.sum() / mine.shape[1])
        self._cut(together, kept, stay.clone())

    def _note(self, there: int, resolved: int, kept: Tensor | float) -> None:
        self.figures.append(torch.tensor([there, resolved, float(kept)]))

    def _cut(self, together: LayerBatch, kept: Tensor, lengths: Tensor) -> None:
        """Evict all but what is ``kept [R, 1 or Hkv, q]`` of the new keys of some layers, ``lengths [R, 1 or Hkv]`` on the CPU;
        what earlier turns left there stays."""
        layers, old = together.layers, together.width - kept.shape[2]
        if old:
            kept = torch.cat([kept.new_ones(*kept.shape[:2], old), kept], dim=-1)
            new = self.prompt.phase(layers[0].number).lengths.repeat(len(layers))
            lengths = lengths + together.lengths - new[:, None]
        self.cuts.begin(self._cutting(together, kept, lengths, old))

    def _cutting(self, together: LayerBatch, kept: Tensor, lengths: Tensor, old: int) -> Asking:
        """Evict as said; where keys are packed the host must know more first."""
        yield from self.stage.evicting(together, kept, lengths, old)
        for layer in together.layers:
            self.done.append(layer.number)
            if self.policy.scheduled:
                rows = None if self.text_rows is None else self.pictured_rows
                self.schedule.begin(layer, rows, self.prompt.length - self.prompt.phase(layer.number).lengths)

    def _text(self, together: LayerBatch, keys: KeyBatch, tokens: Tokens, scores: Tensor, wanted: Tensor) -> Tensor:
        """``[R, Hkv, K]`` bool: the text that stays, ``wanted [R]`` long of every row."""
        if ranker := self.policy.text_ranker():
            scores = self._ranked(together, keys, tokens, ranker)
        return per_head(scores, tokens.text, to_device(wanted, scores.device))

    # --- what is where ----------------------------------------------------------------------------------------
    def tokens(self, number: int, device: torch.device) -> Tokens:
        """The tokens of a prompt that layer ``number`` sees: worked out on the host, once for all layers on ``device`` that see
        the same."""
        phase = self.prompt.phase(number)
        if (id(phase), device) not in self._tokens:
            at = chosen_of(phase)
            valid = at >= 0
            visual = self.layout.visual.gather(1, at.clamp(min=0)) & valid
            places = torch.where(valid, at + self.prompt.seen, -1)
            grid = self.table.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, 4)).masked_fill(
                ~valid[..., None], -1
            )
            rivals = valid & self.pictured_rows[:, None] if self.policy.joint else visual
            told = to_device(torch.cat([places[..., None], visual[..., None], grid], dim=-1), device)
            by_score = self.policy.choice("layer_budget")[0] in ("prefix", "variance")
            self._tokens[id(phase), device] = Tokens(
                # what all layers share is kept small
                places=told[..., 0].clone(),
                visual=told[..., 1].bool(),
                text=(told[..., 0] >= 0) & (told[..., 1] == 0),
                grid=told[..., 2:].int(),
                count=to_device(torch.tensor(self.budget), device),
                question=question_span(self.table, self.policy.protect, device),
                rivals=rivals.sum(1).tolist(),
                texts=(valid & ~visual).sum(1).tolist(),
                at=[to_device(row.nonzero()[:, 0], device) for row in rivals] if by_score else [],
            )
        return self._tokens[id(phase), device]

    @cached_property
    def table(self) -> Tensor:
        """``[B, n, 4]`` int32, see :func:`.token_origins.prompt_grid`; a schedule needs it later on."""
        table = prompt_grid(self.state.shared, self.layout, self.prompt.seen)
        if self.policy.scheduled:
            self.state.shared.grid_table = to_device(table, self.prompt.phase(0).places.device)
        return table

    def expected(self, tokens: Tokens, keys: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Mean and covariance of the queries that may follow ``tokens``, if the policy looks into the future."""
        if not self.policy.future or queries is None or self.state.shared.offset is None:
            return None
        if "future" not in tokens.memo:
            # the same in all layers
            there = tokens.places >= 0
            counted = there & (there.cumsum(1) > self.policy.sinks)
            tokens.memo["future"] = counted, mean_rotation(*self._future(keys, self.state.shared.offset))
        queries = queries.flatten(2).unflatten(2, (-1, keys.shape[3]))
        return expected_queries(queries, *tokens.memo["future"])

    def _future(self, keys: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, n, D]`` of RoPE at the positions behind the prompt."""
        text, device = self.stage.family.text, keys.device
        position = torch.arange(self.policy.future, device=device)
        position = (self.prompt.seen + self.prompt.length - offset.to(device))[:, None] + position
        if "mrope_section" in (text.config.rope_parameters or {}):
            position = position.expand(3, -1, -1)
            if (apart := self.state.shared.axes_ahead) is not None:
                position = position + apart.T.to(device)[..., None]
        # in full precision, as half precision does not tell late positions apart
        cos, sin = (x[0] if x.dim() == 4 else x for x in text.rotary_emb(keys[..., :0].float(), position))
        return cos.to(device), sin.to(device)


def _followed(keys: KeyBatch, behind: TextBehind, together: LayerBatch) -> KeyBatch:
    """The keys of some layers with those of the text behind the prompt, and its queries behind the last ones of the prompt."""
    found = [behind.found[layer.number] for layer in together.layers]
    query, key, value = (joined(parts) for parts in zip(*found, strict=True))
    places = behind.places.to(key.device).repeat(len(found), 1)
    none = torch.full_like(places, -1)
    return replace(
        keys,
        keys=torch.cat([keys.keys, key], 2),
        values=torch.cat([keys.values, value], 2),
        queries=torch.cat([keys.queries, query], 2),
        places=torch.cat([keys.places, places], 1),
        valid=torch.cat([keys.valid, places >= 0], 1),
        visual=torch.cat([keys.visual, torch.zeros_like(places, dtype=torch.bool)], 1),
        index=torch.cat([keys.index, places], 1),
        picture=None if keys.picture is None else torch.cat([keys.picture, none], 1),
        cells=None if keys.cells is None else torch.cat([keys.cells, none[..., None].expand(-1, -1, 3)], 1),
        memo={},
    )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; of one nothing is copied."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
