"""The cache stage of a recipe in one forward: a policy scores, a budget is split, the rest is evicted or merged.

At the end of a prompt a layer is evicted from as soon as its attention has run, or, where the split needs the figures of all
layers, when the forward is over. What happens while decoding is in :mod:`.schedule` and :mod:`.sparse`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from mmaccel_kernels.chosen import ChosenKeys
from torch import Tensor

from ..core.budget import resolve
from ..kv.cache import CacheState
from ..kv.choose import choose, per_head, rank
from ..kv.index import to_device
from ..kv.scoring.importance import behind_pictures, entropy, expected_queries, share_seen
from ..kv.together import Together
from ..method import KeyBatch, LayerAttention, Policy, ReadingPolicy
from ..recipe.recipe import text_policy
from .cache_stage import CacheStage
from .forward import Forward, Prompt, chosen_of
from .layer_budgets import KNOWN, Undecided, by_content, known, prompt_budget
from .places import Tokens, prompt_grid, question_span
from .plan import PlannedStage
from .schedule import Schedule
from .sparse import first_layer, note_prompt, prepare_reads, read_layer, sparse_read


@dataclass(frozen=True)
class Chosen:
    """A layer of which only the device knows how many keys stay.

    kept : ``[B, 1 or Hkv, q]`` bool, of all its new keys. won : ``[B, Hkv]`` long, how many of those that compete.
    there, resolved : how many compete, and their budget, summed over rows.
    """

    number: int
    kept: Tensor
    won: Tensor
    there: int
    resolved: int


class Eviction:
    """What a recipe's policy does in one forward of the text model.

    prompt : what it does at the end of a prompt; None for a continuation.
    pre_rope : ``[B, q, Hq D]`` or ``[B, q, Hq, D]``, the queries of the layer at work before RoPE, if the policy looks at them.
    scaling, asked : the factor of ``q . k`` in the attention of a prompt, and of policies that read some keys at every step the
        last queries of each layer ``[B, Hq, W, D]`` and which are tokens ``[B, W]`` bool; noted for when it is over.
    """

    def __init__(self, forward: Forward, stage: PlannedStage[Policy], state: CacheState) -> None:
        self.forward, self.stage, self.state = forward, stage, state
        self.policy, self.depth = stage.method, len(state.layers)
        rules = CacheStage.of(forward.plan, stage, self.depth)
        self.schedule = Schedule(rules, state)
        self.prompt = PromptEviction(rules, state, forward, self.schedule) if isinstance(forward, Prompt) else None
        if self.prompt is not None:
            self.schedule.catch_up()
        self.pre_rope: Tensor | None = None
        self.scaling = 1.0
        self.asked: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def figures(self) -> list[Tensor]:
        """See :class:`PromptEviction`; none for a continuation."""
        return [] if self.prompt is None else self.prompt.figures

    @property
    def pictured(self) -> dict[int, Tensor]:
        """See :class:`PromptEviction`; none for a continuation."""
        return {} if self.prompt is None else self.prompt.pictured

    @property
    def chooses(self) -> bool:
        """Whether keys of a prompt are scored layer by layer, which takes time worth measuring."""
        return not self.policy.recalls

    @property
    def waiting(self) -> bool:
        """Whether any layer waits for the end of the forward."""
        if self.prompt is None:
            return self.policy.scheduled
        return self.prompt.waiting or self.policy.cap > 0

    def after_attention(
        self,
        number: int,
        query: Tensor,
        key: Tensor,
        visible: Tensor | None,
        scaling: float,
        window: int | None = None,
    ) -> None:
        """``query [B, Hq, q, D]`` and ``key [B, Hkv, K, D]`` of layer ``number``, who sees what ``[B, 1 or Hkv, q, K]``, and
        how far back the layer's sliding ``window`` reaches."""
        if self.policy.recalls:
            self._recall(number, query, key, visible, scaling)
        elif self.prompt is not None:
            tokens = self.prompt.tokens(number, query.device)
            text = (tokens.places >= 0) & ~tokens.visual
            attention = LayerAttention(query, key, visible, scaling, text, memo=tokens.memo)
            received = self._observe(number, attention, tokens.places, window)
            # these queries are large, and free before anything is chosen
            expected, self.pre_rope = self.prompt.expected(tokens.places, key, self.pre_rope), None
            self.prompt.after_attention(number, attention, tokens, received, expected)
        elif self.policy.scheduled:
            places = self.forward.phase(number).places.to(query.device, non_blocking=True)
            self.schedule.note(self.state.layers[number], query, places, scaling, window)

    def read(self, number: int, query: Tensor, key: Tensor | None, scaling: float) -> ChosenKeys | None:
        """What the attention of layer ``number`` is to read of all that it stores; None for everything. ``key`` is None where
        packed keys are not to be decoded unless they are needed."""
        policy = self.policy
        if not isinstance(policy, ReadingPolicy) or self.prompt is not None or query.shape[2] > 1:
            return None
        if number < first_layer(policy, self.depth):
            return None
        return read_layer(policy, self.state.layers[number], query, key, scaling)

    def settle(self) -> None:
        """The forward is over: evict from the layers that waited for it."""
        if self.prompt is not None:
            self.prompt.settle()
            if isinstance(self.policy, ReadingPolicy):
                first = first_layer(self.policy, self.depth)
                prepare_reads(self.policy, self.state.layers[first:], self.scaling, self.asked)
                self.asked = {}
        if self.policy.scheduled:
            self.schedule.settle(self.prompt is not None)

    def _observe(self, number: int, attention: LayerAttention, places: Tensor, window: int | None) -> Tensor | None:
        """What the policy makes of the attention of a layer, ``[B, Hkv, K]`` float32; a schedule carries it on."""
        policy, schedule, key = self.policy, self.state.layers[number].schedule, attention.key
        received = None
        if policy.observes:
            before = schedule.figures(key.shape[2])
            before = key.new_zeros(key.shape[:3], dtype=torch.float32) if before is None else before
            received = policy.observe(attention, before)
        if policy.scheduled:
            schedule.received, schedule.scaling, schedule.window = received, attention.scaling, window
            if policy.window:
                # those of a whole prompt are large
                last = slice(-policy.window, None)
                schedule.remember(attention.query[:, :, last].clone(), places[:, last].clone())
                schedule.keep(policy.window)
        return received

    def _recall(self, number: int, query: Tensor, key: Tensor, visible: Tensor | None, scaling: float) -> None:
        """At a prompt note what there is; at a decode step choose what the layers from ``layer`` on read."""
        if self.prompt is not None:
            self.prompt.note(number, query.device)
            self.scaling = scaling
            if self.policy.window:
                places = self.prompt.tokens(number, query.device).places[:, -self.policy.window :]
                self.asked[number] = query[:, :, -self.policy.window :].clone(), places >= 0
            return
        if isinstance(self.policy, ReadingPolicy):
            # chosen before the attention
            return
        first = first_layer(self.policy, self.depth)
        if number == first - 1 and query.shape[2] == 1:
            text = torch.ones(len(query), 1, dtype=torch.bool, device=query.device)
            attention = LayerAttention(query, key, visible, scaling, text)
            read = sparse_read(self.policy, self.state.shared, self.state.layers[number], first, attention)
            self.forward.incoming.sparse = read


class PromptEviction:
    """What a policy does at the end of a prompt with pictures.

    A layer whose budget is known before it is scored is evicted from at once, and nothing waits for the device. Where counts
    depend on the scores those of all layers are copied to the host together, when the forward is over.

    figures : per layer ``[3]`` float on the CPU: visual keys of this forward there were, resolved, and kept, summed over rows,
        mean over heads. With a joint budget, of all keys.
    pictured : per layer ``[B, 1]`` long on the CPU, visual keys of this forward that stay in each head, where the host knows.
    """

    def __init__(self, stage: CacheStage, state: CacheState, prompt: Prompt, schedule: Schedule) -> None:
        self.stage, self.policy, self.state = stage, stage.policy, state
        self.prompt, self.layout, self.schedule = prompt, prompt.layout, schedule
        self.figures: list[Tensor] = []
        self.pictured: dict[int, Tensor] = {}
        self.undecided: list[Undecided] = []
        self.chosen: list[Chosen] = []
        self._tokens: dict[tuple[int, torch.device], Tokens] = {}

    @property
    def waiting(self) -> bool:
        """Whether any layer waits for the end of the forward."""
        return bool(self.undecided or self.chosen)

    def note(self, number: int, device: torch.device) -> None:
        """Drop nothing, but note what there is for steps that read some of it."""
        tokens = self.tokens(number, device)
        there = sum(tokens.rivals)
        self._note(there, sum(self.budget), there)
        if number == 0:
            note_prompt(self.state.shared, to_device(self.table, device), tokens.count)

    def after_attention(
        self,
        number: int,
        attention: LayerAttention,
        tokens: Tokens,
        received: Tensor | None,
        expected: tuple[Tensor, Tensor] | None,
    ) -> None:
        """The attention of a layer has run: evict what does not stay, or note what is needed when the forward is over.

        Parameters
        ----------
        received : ``[B, Hkv, K]`` float32, see :meth:`mmaccel.method.Policy.observe`. expected : see
            :class:`~mmaccel.method.KeyBatch`.
        """
        policy, places = self.policy, tokens.places
        keys, values = self.state.layers[number].stored()
        new = places.shape[1]
        queries = attention.query[:, :, new - min(policy.window, new) :]
        split, _ = policy.choice("layer_budget")
        waits = policy.deferred or split not in KNOWN
        grid = tokens.grid.long()
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
            picture=grid[..., 0],
            cells=grid[..., 1:],
            expected=expected,
            outgoing=self.stage.outgoing(number, values[:, :, -new:]),
            layer=number,
            depth=self.stage.depth,
            memo=tokens.memo,
        )
        if waits:
            seen = None
            if split == "sparsity":
                seen = share_seen(attention, attention.once(behind_pictures), 0.01)
            elif split == "entropy":
                seen = entropy(attention).exp()
            self.undecided.append(Undecided(batch, tokens, seen))
        else:
            self._choose(batch, tokens, self._rank(batch, tokens), self.layer_budgets()[number])

    def settle(self) -> None:
        """The forward is over: evict from the layers that waited for it."""
        undecided, self.undecided = self.undecided, []
        if undecided:
            scores = []
            for one in undecided:
                if self.policy.deferred:
                    kept = self.prompt.total.kept.to(one.keys.index.device, non_blocking=True)
                    reach = kept.gather(1, (one.keys.index - self.prompt.seen).clamp(min=0)) & one.keys.valid
                    one.keys = replace(one.keys, survivors=reach)
                scores.append(self._rank(one.keys, one.tokens))
            split, uniform = self.policy.choice("layer_budget")
            if split in KNOWN:
                counts = self.layer_budgets()
            else:
                counts = by_content(split, uniform or 0.0, self.budget, undecided, scores)
            for score, count in zip(scores, counts, strict=True):
                # what a layer stored as a whole is free before the next one is evicted from
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
                self._cut(layer.number, layer.kept, kept.clone())

    # --- choosing ---------------------------------------------------------------------------------------------
    @cached_property
    def budget(self) -> list[int]:
        """Per row, see :func:`.layer_budgets.prompt_budget`."""
        return prompt_budget(self.stage, self.layout)

    def layer_budgets(self) -> list[list[int]]:
        """Per layer and row: how many of the competing keys stay, where that does not depend on the content."""
        return known(self.stage, self.layout, self.budget)

    def _rank(self, keys: KeyBatch, tokens: Tokens, by: Policy | None = None) -> Tensor:
        return rank(self.policy, keys, self.prompt.seen == 0, tokens.question, by)

    def _choose(self, keys: KeyBatch, tokens: Tokens, scores: Tensor, count: list[int]) -> None:
        """Of one layer at the end of a prompt, choose what stays of the keys that are new."""
        policy = self.policy
        among = keys.valid if policy.joint else keys.valid & keys.visual
        kept = choose(policy, scores, among, to_device(torch.tensor(count), scores.device), self.stage.official)
        won, lengths = kept.sum(-1), [min(c, n) for c, n in zip(count, tokens.rivals, strict=True)]
        # a stage before this one may have left fewer than the budget
        there, resolved = sum(tokens.rivals), sum(tokens.rivals if self.stage.retain is None else lengths)
        certain = policy.budget == "exact" and policy.choice("head_budget")[0] == "uniform"
        if certain:
            self._note(there, resolved, sum(lengths))
        if not policy.joint:
            if certain:
                self.pictured[keys.layer] = torch.tensor(lengths)[:, None]
            wanted = tokens.texts
            text = (keys.valid & ~keys.visual)[:, None]
            if self.stage.text_retain is not None:
                wanted = [resolve(self.stage.text_retain, n) if n else 0 for n in tokens.texts]
                text = self._text(keys, tokens, scores, text[:, 0], wanted)
            kept = kept | text
            lengths = [a + min(b, n) for a, b, n in zip(lengths, wanted, tokens.texts, strict=True)]
        if policy.shared:
            kept = kept[:, :1]
        if certain:
            self._cut(keys.layer, kept, torch.tensor(lengths)[:, None])
        else:
            self.chosen.append(Chosen(keys.layer, kept, won, there, resolved))

    def _note(self, there: int, resolved: int, kept: Tensor | float) -> None:
        self.figures.append(torch.tensor([there, resolved, float(kept)]))

    def _cut(self, number: int, kept: Tensor, lengths: Tensor) -> None:
        """Evict all but what is ``kept [B, 1 or Hkv, q]`` of the new keys of one layer, ``lengths [B, 1 or Hkv]`` on the CPU;
        what earlier turns left there stays."""
        layer = self.state.layers[number]
        old = len(layer.index) - kept.shape[2]
        if old:
            kept = torch.cat([kept.new_ones(*kept.shape[:2], old), kept], dim=-1)
            lengths = lengths + layer.index.lengths - self.prompt.phase(number).lengths[:, None]
        self.stage.evict(Together([layer]), kept, lengths, old)
        if self.policy.scheduled:
            self.schedule.begin(layer)

    def _text(self, keys: KeyBatch, tokens: Tokens, scores: Tensor, text: Tensor, wanted: list[int]) -> Tensor:
        if self.policy.text_policy:
            scores = self._rank(keys, tokens, text_policy(self.policy.text_policy))
        return per_head(scores, text, to_device(torch.tensor(wanted), scores.device))

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
            rivals = valid if self.policy.joint else visual
            told = to_device(torch.cat([places[..., None], visual[..., None], grid], dim=-1), device)
            by_score = self.policy.choice("layer_budget")[0] in ("prefix", "variance")
            self._tokens[id(phase), device] = Tokens(
                # what all layers share is kept small
                places=told[..., 0].clone(),
                visual=told[..., 1].bool(),
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
        """``[B, n, 4]`` int32, see :func:`.places.prompt_grid`; a schedule needs it later on."""
        table = prompt_grid(self.state.shared, self.layout, self.prompt.seen)
        if self.policy.scheduled:
            self.state.shared.grid_table = to_device(table, self.prompt.phase(0).places.device)
        return table

    def expected(self, places: Tensor, keys: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """What the queries behind those at ``places [B, q]`` may be, if the policy looks into the future."""
        policy, text, offset = self.policy, self.stage.text, self.state.shared.offset
        if not policy.future or queries is None or offset is None:
            return None
        there, position = places >= 0, torch.arange(policy.future, device=keys.device)
        position = (self.prompt.seen + self.prompt.length - offset.to(keys.device))[:, None] + position
        if "mrope_section" in (text.config.rope_parameters or {}):
            position = position.expand(3, -1, -1)
        # in full precision, as half precision does not tell late positions apart
        cos, sin = (x[0] if x.dim() == 4 else x for x in text.rotary_emb(keys[..., :0].float(), position))
        queries = queries.flatten(2).unflatten(2, (-1, keys.shape[3]))
        counted = there & (there.cumsum(1) > policy.sinks)
        return expected_queries(queries, counted, cos.to(keys.device), sin.to(keys.device))
