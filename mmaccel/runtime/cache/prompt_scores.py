"""Scores of the keys of a prompt: layers that wait for eviction are joined to one batch, which a policy scores."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.layer_batch import LayerBatch
from ...kv.packed import QuantisedLayer
from ...kv.select import rank, scored
from ...method import KeyBatch, Policy
from ..call.forward import Prompt
from ..prompt.preview import TextBehind
from .layer_budgets import Waiting
from .rules import CacheRules
from .token_origins import Tokens


@dataclass(frozen=True)
class Candidates:
    """Keys of a prompt in layers that form one batch: those of the budget compete, the others stay as the recipe says.

    layers : the rows are those of one layer after the other. keys : what a policy sees of them.
    tokens : their tokens, for all rows.
    """

    layers: LayerBatch
    keys: KeyBatch
    tokens: Tokens


class PromptScores:
    """Scores of the keys of a prompt, by the policy of a recipe.

    waiting : by number, layers whose attention has run and from which nothing is evicted yet.
    behind : the text that a draft, or the model, has written behind the prompt, for policies that score by it.
    reread : by number of a layer, figures that are known only when the prompt is over, ``[B, Hkv, K]`` float32: what a policy
        has observed while the prompt was read again, or how little the tokens were expected.
    """

    def __init__(self, rules: CacheRules, state: CacheState, prompt: Prompt) -> None:
        self.rules, self.policy, self.state, self.prompt = rules, rules.policy, state, prompt
        self.waiting: dict[int, Waiting] = {}
        self.behind: TextBehind | None = None
        self.reread: dict[int, Tensor] = {}

    def kind(self, layer: QuantisedLayer) -> Hashable:
        """A value that is equal for layers which can be rows of one batch."""
        waiting = self.waiting[layer.number]
        return id(waiting.tokens), len(layer.index), waiting.scaling

    def candidates(self, layers: LayerBatch) -> Candidates:
        """The keys of the prompt in ``layers``, with what the policy looks at."""
        waiting = [self.waiting[layer.number] for layer in layers.layers]
        tokens = waiting[0].tokens.of_layers(len(waiting))
        places, grid = tokens.places, tokens.grid.long()
        keys, values = (x[:, :, -places.shape[1] :] for x in layers.stored)
        queries, valid = joined([one.queries for one in waiting]), places >= 0
        expected = [one.expected for one in waiting if one.expected is not None]
        unrotated = [one.unrotated for one in waiting if one.unrotated is not None]
        width = places.shape[1]
        again = [x[..., -width:] for one in layers.layers if (x := self.reread.get(one.number)) is not None]
        received = again or [one.received for one in waiting if one.received is not None]
        batch = KeyBatch(
            keys=keys,
            values=values,
            queries=queries,
            places=places[:, places.shape[1] - queries.shape[2] :],
            valid=valid,
            visual=tokens.visual,
            index=places,
            scaling=waiting[0].scaling,
            received=joined(received) if self.policy.observes or again else None,
            count=tokens.count,
            picture=grid[..., 0],
            cells=grid[..., 1:],
            survivors=self._survivors(places, len(waiting)) & valid if self.policy.deferred else None,
            expected=(joined([m for m, _ in expected]), joined([c for _, c in expected])) if expected else None,
            outgoing=self._outgoing(layers, values) if self.policy.needs_outgoing else None,
            ordinal=self.state.shared.places.ordinal(places) if self.policy.needs_ordinals else None,
            separator=self.state.shared.places.separator(places) if self.policy.needs_separators else None,
            unrotated=joined(unrotated) if unrotated else None,
            layer=layers.layers[0].number if len(waiting) == 1 else -1,
            depth=self.rules.depth,
            memo=tokens.memo,
        )
        return Candidates(layers, batch, tokens)

    def ranked(self, candidates: Candidates, by: Policy | None = None) -> Tensor:
        """The scores ``[R, Hkv, K]`` by the policy, or by another one, infinite where a key is protected."""
        policy, layers = by or self.policy, candidates.layers.layers
        if policy.by_layer and len(layers) > 1:
            scores = torch.cat([scored(policy, self.candidates(LayerBatch([layer])).keys) for layer in layers])
        else:
            scores = self.raw(candidates) if by is None else scored(by, candidates.keys)
        return rank(self.policy, candidates.keys, self.prompt.seen == 0, candidates.tokens.question, scores)

    def raw(self, candidates: Candidates) -> Tensor:
        """The scores ``[R, Hkv, K]`` by the policy, before keys are protected."""
        keys = candidates.keys
        if self.behind is None:
            return scored(self.policy, keys)
        return scored(self.policy, _with_text_behind(keys, self.behind, candidates.layers))[..., : keys.keys.shape[2]]

    def _survivors(self, places: Tensor, layers: int) -> Tensor:
        """``[R, K]`` bool, tokens that no later layer drops."""
        kept = to_device(self.prompt.total.kept, places.device).repeat(layers, 1)
        return kept.gather(1, (places - self.prompt.seen).clamp(min=0))

    def _outgoing(self, layers: LayerBatch, values: Tensor) -> Tensor:
        """Norms of ``values [R, Hkv, K, D]`` behind the output projection of each layer."""
        parts = zip(layers.layers, values.split(layers.rows), strict=True)
        norms = [self.rules.outgoing(layer.number, part) for layer, part in parts]
        return joined([norm for norm in norms if norm is not None])


def _with_text_behind(keys: KeyBatch, behind: TextBehind, layers: LayerBatch) -> KeyBatch:
    """The keys of some layers with those of the text behind the prompt, and its queries after the last ones of the prompt."""
    parts = [behind.found[layer.number] for layer in layers.layers]
    query, key, value = (joined(tensors) for tensors in zip(*parts, strict=True))
    places = behind.places.to(key.device).repeat(len(parts), 1)
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
        written=places.shape[1],
    )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; a single part is not copied."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
