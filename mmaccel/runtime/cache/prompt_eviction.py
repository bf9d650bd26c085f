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

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...core.budget import resolve
from ...core.reduction import top_mask
from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.layer_batch import LayerBatch, batches, size
from ...kv.scoring.importance import behind_pictures, entropy, share_seen
from ...kv.select import choose, per_head
from ...method import LayerAttention
from ..call.forward import Prompt
from .evictor import Evictor, Uncounted
from .layer_budgets import KNOWN, Waiting, by_content, globally
from .prompt_scores import Candidates, PromptScores
from .prompt_tokens import PromptTokens
from .rules import CacheRules
from .schedule import Schedule
from .sparse_read import note_prompt
from .token_origins import Tokens

#: bytes of keys and values of the layers that wait for each other on a GPU, at most
BYTES = 1 << 25


def room_on(device: torch.device) -> int:
    """Bytes that layers on a device may hold while they wait for each other."""
    return 0 if device.type == "cpu" else BYTES


class PromptEviction:
    """Eviction at the end of a prompt with pictures.

    Where budgets are known before layers are scored nothing waits for the device. Where counts depend on the scores those of
    all layers are copied to the host together, when the forward is over.
    """

    def __init__(self, rules: CacheRules, state: CacheState, prompt: Prompt, schedule: Schedule) -> None:
        self.rules, self.policy, self.state, self.prompt = rules, rules.policy, state, prompt
        self.tokens = PromptTokens(rules, state, prompt)
        self.scores = PromptScores(rules, state, prompt)
        self.evictor = Evictor(rules, prompt, self.tokens, schedule)
        self.split = self.policy.choice("layer_budget")[0]
        policy = self.policy
        waits = policy.deferred or policy.rereads or policy.lookahead > 0 or policy.needs_surprise or policy.guided
        #: whether all layers wait for the end of the forward
        self.late = waits or self.split not in KNOWN

    def note(self, number: int, device: torch.device) -> None:
        """Evict nothing, but note the prompt for steps that read only some of its keys."""
        tokens = self.tokens.of_layer(number, device)
        candidates = sum(tokens.rivals)
        self.evictor.note(candidates, sum(self.tokens.budget), candidates)
        if number == 0:
            table = to_device(self.tokens.table, device)
            note_prompt(self.state.shared, table, tokens.count, self.tokens.text_rows)

    @property
    def reads_attention(self) -> bool:
        """Whether something is computed from the attention of every layer, which takes time worth measuring."""
        return self.policy.observes or self.policy.future > 0 or self.split in ("sparsity", "entropy")

    def after_attention(
        self,
        number: int,
        attention: LayerAttention,
        tokens: Tokens,
        received: Tensor | None,
        expected: tuple[Tensor, Tensor] | None,
        unrotated: Tensor | None = None,
    ) -> None:
        """The attention of a layer has run: keep what choosing its keys needs.

        Parameters
        ----------
        received : ``[B, Hkv, K]`` float32, see :meth:`mmaccel.method.Policy.observe`. expected : see
            :class:`~mmaccel.method.KeyBatch`. unrotated : ``[B, q, Hkv D]`` or ``[B, q, Hkv, D]``, the new keys before RoPE.
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
        self.scores.waiting[number] = Waiting(
            layer=self.state.layers[number],
            tokens=tokens,
            queries=last,
            scaling=attention.scaling,
            received=None if received is None else received[..., -tokens.places.shape[1] :],
            expected=expected,
            seen=seen,
            unrotated=None if unrotated is None else unrotated.flatten(2).unflatten(2, (-1, channels)).transpose(1, 2),
        )

    def note_turn(self, number: int, before: Tensor, after: Tensor) -> None:
        """Note the cosine of the hidden states ``[B, q, D]`` before and behind the attention of a layer, mean over tokens."""
        if (one := self.scores.waiting.get(number)) is not None:
            valid = one.tokens.places.to(before.device) >= 0
            cosine = torch.cosine_similarity(before.float(), after.float(), dim=-1).masked_fill(~valid, 0.0)
            mean = cosine.sum(1) / valid.sum(1).clamp(min=1)
            self.scores.waiting[number] = replace(one, seen=mean)

    def flush_if_full(self) -> None:
        """Evict from the layers that wait if one more would exceed the bytes they may hold."""
        sizes = [size(one.layer) for one in self.scores.waiting.values()]
        # one more may be as large as the last one
        if not self.late and sum(sizes) + sizes[-1] > self.room:
            self._evict_timed(list(self.scores.waiting))

    def finalize(self) -> None:
        """The forward is over: evict from the layers that waited for it."""
        if self.scores.waiting:
            self._evict_timed(None if self.late else list(self.scores.waiting))
        self.evictor.finalize()

    @property
    def room(self) -> int:
        """Bytes that layers may hold while they wait for each other."""
        return room_on(self._device)

    @property
    def _device(self) -> torch.device:
        """Where the keys of the first layer that waits are."""
        return next(iter(self.scores.waiting.values())).layer.keys.device

    def _evict_timed(self, layers: list[int] | None) -> None:
        with self.prompt.measured("selection", self._device, layers):
            self._evict()

    def _evict(self) -> None:
        """Choose the keys that stay in the layers that wait, and evict the others."""
        waiting = self.scores.waiting
        groups = list(batches([one.layer for one in waiting.values()], self.scores.kind, self.room))
        scores: list[Tensor | None] = [None] * len(groups)
        if self.split in KNOWN:
            counts = dict(enumerate(self.tokens.layer_budgets()))
        else:
            counts, scores = self._by_content(groups)
        while groups:
            # what layers stored as a whole is free before the next ones are evicted from
            layers, ranked = groups.pop(0), scores.pop(0)
            candidates = self.scores.candidates(layers)
            if ranked is None:
                ranked = self.scores.ranked(candidates)
            self._choose(candidates, ranked, [counts[layer.number] for layer in layers.layers])
            for layer in layers.layers:
                del waiting[layer.number]
            del layers, candidates
        self.evictor.cuts.finish()

    def _by_content(self, groups: list[LayerBatch]) -> tuple[dict[int, list[int]], list[Tensor | None]]:
        """Per layer and row how many of the competing keys stay; and the scores of every group, ``[R, Hkv, K]``."""
        scores: list[Tensor | None] = []
        waiting, each, raw = [], [], []
        for group in groups:
            # what it joins is free before the next one is ranked
            candidates = self.scores.candidates(LayerBatch(group.layers))
            ranked = self.scores.ranked(candidates)
            scores.append(ranked)
            waiting += [self.scores.waiting[layer.number] for layer in group.layers]
            each += ranked.split(group.rows)
            if self.policy.official and self.split == "prefix":
                raw += self.scores.raw(candidates).split(group.rows)
        if self.split == "global":
            counts = [one.tokens.rivals for one in waiting]
            best = globally(self.rules, self.tokens.budget, waiting, each)
            scores = [torch.cat([best.pop(0) for _ in group.layers]) for group in groups]
        else:
            counts = by_content(self.rules, self.tokens.budget, waiting, each, raw)
        return {one.layer.number: count for one, count in zip(waiting, counts, strict=True)}, scores

    def _choose(self, candidates: Candidates, scores: Tensor, counts: Sequence[list[int]]) -> None:
        """Choose what stays of the new keys, ``counts`` of those that compete per layer and row, and evict the others."""
        policy, keys, tokens = self.policy, candidates.keys, candidates.tokens
        layers, rows = candidates.layers.layers, candidates.layers.rows
        compete = keys.valid if policy.joint else keys.valid & keys.visual
        whole = None if self.tokens.text_rows is None else self.tokens.text_rows.repeat(len(layers))
        count, texts = torch.tensor(counts).flatten(), torch.tensor(tokens.texts)
        if policy.joint and whole is not None:
            compete, count = compete & ~to_device(whole, compete.device)[:, None], count.masked_fill(whole, 0)
        won = kept = choose(policy, scores, compete, to_device(count, scores.device))
        # a stage before this one may have left fewer than the budget
        lengths = count.minimum(torch.tensor(tokens.rivals))
        rivals, wins = sum(tokens.rivals[:rows]), lengths.view(-1, rows).sum(1).tolist()
        resolved = wins if self.rules.retain is not None else [rivals] * len(wins)
        if self.split == "global":
            resolved = [sum(self.tokens.budget)] * len(wins)
        certain = not policy.drops_lowest and policy.choice("head_budget")[0] == "uniform"
        if not policy.joint:
            if certain:
                per_layer = zip(layers, lengths[:, None].split(rows), strict=True)
                self.evictor.pictured.update((layer.number, length) for layer, length in per_layer)
            text, stay = self._text(candidates, scores, whole)
            kept, lengths = kept | text, lengths + stay
        elif whole is not None:
            kept = kept | (tokens.text & to_device(whole, kept.device)[:, None])[:, None]
            lengths = torch.where(whole, texts, lengths)
        if policy.shared:
            kept = kept[:, :1]
        spots = (
            self._spots(scores, won)
            if policy.merged_keys and not torch.equal(count, torch.tensor(tokens.rivals))
            else None
        )
        if certain:
            for budget, stays in zip(resolved, wins, strict=True):
                self.evictor.note(rivals, budget, stays)
            self.evictor.evict(candidates.layers, kept, lengths[:, None], spots)
        else:
            self.evictor.uncounted.append(Uncounted(layers, kept, won.sum(-1), rivals, resolved, spots))

    def _spots(self, scores: Tensor, won: Tensor) -> Tensor:
        """``[R, Hkv or 1, K]`` bool: the keys of lowest ``scores [R, Hkv, K]`` among those that have ``won``, in whose places
        the others are merged."""
        count = (won.sum(-1) - self.policy.merged_keys).clamp(min=0)
        best = top_mask(scores.flatten(0, 1), won.flatten(0, 1), count.flatten()).view_as(won)
        return (won & ~best)[:, : 1 if self.policy.shared else None]

    def _text(self, candidates: Candidates, scores: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor]:
        """The text that stays, ``[R, 1 or Hkv, K]`` bool, and how many of each row, ``[R]`` long on the CPU; rows that are
        ``whole [R]`` keep all of it."""
        tokens, texts = candidates.tokens, torch.tensor(candidates.tokens.texts)
        if self.rules.text_retain is None:
            return tokens.text[:, None], texts
        wanted = torch.tensor([resolve(self.rules.text_retain, n) if n else 0 for n in tokens.texts])
        wanted = wanted if whole is None else torch.where(whole, texts, wanted)
        if ranker := self.policy.text_ranker():
            scores = self.scores.ranked(candidates, ranker)
        return per_head(scores, tokens.text, to_device(wanted, scores.device)), wanted.minimum(texts)
