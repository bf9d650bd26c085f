"""How a golden vector reaches the product: methods come from the registry, and the product's own code runs them.

Methods at the sites ``projector`` and ``layers`` are called as the door calls them (``reduce`` on a :class:`TokenBatch`,
``look`` on a :class:`LayerAttention`), those inside the tower as its hook does (``match``, ``weigh``), codecs as the cache
does (``pack``). Policies run in :class:`CacheRun`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.layout import Layout, Segment, Tile
from mmaccel.core.reduction import Reduction
from mmaccel.core.stats import Stats
from mmaccel.decoding.accept import accept_branch, accept_greedy, accept_sampled
from mmaccel.decoding.base import Drafter
from mmaccel.decoding.drafters import get_drafter
from mmaccel.decoding.tree import StaticTree
from mmaccel.families.mrope import ThreeAxes, next_positions
from mmaccel.kv.cache import CacheState
from mmaccel.kv.distance import distance_factor
from mmaccel.kv.forward_info import ForwardInfo, Phase
from mmaccel.method import DraftPolicy, LayerAttention, Method, Policy, ReadingPolicy, registry
from mmaccel.method.base import Variant
from mmaccel.runtime.cache.dual_chunk import dual_chunk_attention
from mmaccel.runtime.cache.eviction import CachePolicy, EvictKeys
from mmaccel.runtime.cache.guided_eviction import EvictByGuides, fold_keys, reindexed
from mmaccel.runtime.cache.reading import ReadKeys, RecallKeys
from mmaccel.runtime.call.forward import Continuation, Forward, Prompt, PromptResult
from mmaccel.runtime.call.plan import PlannedStage
from mmaccel.runtime.call.runs import LayerAttended, TextInputs

Compare = Callable[[Mapping[str, Any], Mapping[str, Tensor]], None]

#: the registered methods, drafters and functions that were used since this was last cleared
made: list[str] = []
#: functions of the product that vectors show though they are no method
FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (
        accept_branch,
        accept_greedy,
        accept_sampled,
        StaticTree,
        ThreeAxes.new_positions,
        distance_factor,
        dual_chunk_attention,
        fold_keys,
        next_positions,
        reindexed,
    )
}
#: what comparators call that no registered method calls
BENEATH: dict[Compare, str] = {}


def make(
    name: str, given: Mapping[str, Callable[..., Any]] | None = None, variant: Variant = "official", **options: Any
) -> Any:
    """The registered method ``name`` with these options, by default in its authors' variant.

    ``given`` replaces parts of it that look at a model by what the vector holds in their place.
    """
    kind = registry.get_method(name)
    method: Method = (type(kind.__name__, (kind,), dict(given)) if given else kind)(**options).by(variant)
    made.append(name)
    return method


def make_drafter(name: str, **options: Any) -> Any:
    """The drafter ``name`` with these options."""
    drafter: Drafter = get_drafter(name)(**options)
    made.append(name)
    return drafter


def run(name: str, *args: Any) -> Any:
    """What one of :data:`FUNCTIONS` returns."""
    made.append(name)
    return FUNCTIONS[name](*args)


def whole(share: float, size: int) -> list[int]:
    """The budgets in whole tokens on both sides of a share that an authors' program takes as it is."""
    exact = round(share * size, 6)
    return sorted({math.floor(exact), math.ceil(exact)})


# --- what a comparison may find ---------------------------------------------------------------------------------------
class NotOffered(AssertionError):
    """The vector shows a variant that the registered method does not offer."""


class Fault(Exception):
    """The vector shows a fault of the authors' program that ours deliberately lacks, and the comparison failed as it should."""


def beneath(what: str) -> Callable[[Compare], Compare]:
    """Marks a comparator of which a part, ``what``, is reached by tests only, no registered method calls it."""

    def mark(compare: Compare) -> Compare:
        BENEATH[compare] = what
        return compare

    return mark


@contextmanager
def fault(there: object, why: str) -> Iterator[None]:
    """Where the authors' fault is ``there``, the comparison in this block must fail; else it must pass."""
    try:
        yield
    except AssertionError as failed:
        if not there:
            raise
        raise Fault(why) from failed
    assert not there, f"the comparison passes, so this is no fault any more: {why}"


def in_their_order(score: Tensor, chosen: Tensor) -> Tensor:
    """``score [..., n]`` as whole numbers in which equal scores come as ``chosen [..., n]`` bool has them, then by place.

    Nothing but exact ties is decided so: a choice that is not the best by ``score`` does not become it.
    """
    order = (~chosen).long().argsort(dim=-1, stable=True)
    order = order.gather(-1, score.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    place = torch.arange(score.shape[-1], 0, -1, dtype=torch.float32).expand(score.shape)
    return torch.empty_like(place).scatter_(-1, order, place)


# --- layers -----------------------------------------------------------------------------------------------------------
def paid(rows: Tensor, text: Tensor | None = None) -> LayerAttention:
    """A layer whose logits are ``rows [B, H, q, K]``, of which causal attention shows the last ``q`` keys one by one."""
    query, key = as_queries(rows)
    text = torch.ones(len(rows), rows.shape[2], dtype=torch.bool) if text is None else text
    return LayerAttention(query, key, None, 1.0, text)


def as_queries(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Queries ``[B, H, q, q]`` and keys ``[B, H, K, q]`` whose products are ``rows [B, H, q, K]``."""
    batch, heads, count, _ = rows.shape
    return torch.eye(count).expand(batch, heads, count, count), rows.clamp(min=-1e9).mT.contiguous()


# --- the cache --------------------------------------------------------------------------------------------------------
class _Watched(EvictKeys):
    """Notes what the product ranks."""

    def __init__(
        self, forward: Forward, stage: PlannedStage[Policy], state: CacheState, seen: Sequence[float] = ()
    ) -> None:
        super().__init__(forward, stage, state)
        self.ranks: list[Tensor] = []
        self.seen = seen
        if self.prompt is not None:
            self.prompt.scores.ranked = self._noted(self.prompt.scores.ranked)  # type: ignore[method-assign]

    def after_attention(self, layer: LayerAttended) -> None:
        super().after_attention(layer)
        number = layer.number
        if self.prompt is not None and self.seen and number in self.prompt.scores.waiting:
            # what the vector says of the attention of a layer that it does not hold
            waiting = self.prompt.scores.waiting
            waiting[number] = replace(waiting[number], seen=torch.tensor([self.seen[number]], dtype=torch.float64))

    def _noted(self, rank: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def ranked(*args: Any, **named: Any) -> Tensor:
            self.ranks.append(rank(*args, **named))
            return self.ranks[-1]

        return ranked


class _Guided(EvictByGuides):
    """Its guides pay what a vector says, ``[B, K]`` of every layer."""

    paid: Sequence[Tensor]

    def _paid(self) -> dict[int, Tensor]:
        return dict(enumerate(self.paid))


class CacheRun:
    """The cache stage of a recipe on tensors: the run of its kind of policy on the layers of a real cache.

    Parameters
    ----------
    policy : a policy as :func:`make` returns it.
    retain : how many keys stay; of all keys if the policy is ``joint``, else of the visual ones. A float is a share.
    layers : of the language model.
    visual : ``[S]`` bool, the places that are visual; by default all.
    grid : (t, h, w) of the visual places, in raster order; by default one row.
    seen : per layer what its budget is in proportion to, where attention settles that.
    text : what the policy asks of the language model (``rotary_emb``, ``o_proj``).
    guides_pay : per layer the attention that the guide of a guided policy pays to each key, ``[B, K]``.
    """

    def __init__(
        self,
        policy: Policy,
        retain: float,
        *,
        layers: int = 1,
        visual: Tensor | None = None,
        grid: tuple[int, int, int] | None = None,
        seen: Sequence[float] = (),
        text: Any = None,
        guides_pay: Sequence[Tensor] = (),
    ) -> None:
        self.seen, self.guides_pay = seen, guides_pay
        self.policy, self.visual, self.grid = policy, visual, grid
        self.stage = PlannedStage(0, policy, retain)
        recipe = SimpleNamespace(text_retain=None)
        # what the cache stage reads of a plan
        family = SimpleNamespace(
            text=text,
            attending=range(layers),
            attention_in=lambda i: text.layers[i].self_attn,
            outgoing_in=lambda i: text.layers[i].self_attn.o_proj,
        )
        drafts = self.stage if isinstance(policy, DraftPolicy) else None
        self.plan: Any = SimpleNamespace(recipe=recipe, family=family, draft_policy=drafts, stages=(), token_groups=())
        self.state = CacheState(layers)
        self.run: CachePolicy

    def begin(self, size: int, rows: int = 1, prompt: bool = True) -> Any:
        """A forward of ``size`` new tokens."""
        seen = self.state.seen
        places = torch.arange(seen, seen + size).expand(rows, -1)
        incoming = ForwardInfo(seen, size, False, [(0, Phase(places, False, places - seen))])
        given = self.plan, Stats("conformance"), self.state, incoming, places.device
        if prompt:
            layout = self._layout(size, rows)
            ids = torch.zeros(rows, size, dtype=torch.long)
            self.forward: Forward = Prompt(*given, PromptResult(layout, Reduction.identity(layout.valid)), ids)
        else:
            self.forward = Continuation(*given)
        self.state.positions.offset = torch.zeros(rows, dtype=torch.long)
        given = self.forward, self.stage, self.state
        if isinstance(self.policy, ReadingPolicy):
            self.run = ReadKeys(*given)
        elif self.policy.guided:
            self.run = _Guided(None, *given)  # type: ignore[arg-type]
            self.run.paid = self.guides_pay
        else:
            self.run = RecallKeys(*given) if self.policy.recalls else _Watched(*given, self.seen)
        self.run.before_text(TextInputs({"position_ids": places}))
        return self.run

    @property
    def ranks(self) -> list[Tensor]:
        """What the last forward has ranked, in order."""
        assert isinstance(self.run, _Watched)
        return self.run.ranks

    def _layout(self, size: int, rows: int) -> Layout:
        at = (torch.ones(size, dtype=torch.bool) if self.visual is None else self.visual).nonzero()[:, 0]
        tile = Tile.raster(*(self.grid or (1, 1, len(at))), offset=0)
        assert len(tile) == len(at)
        valid = torch.ones(rows, size, dtype=torch.bool)
        return Layout(valid, [Segment(row, "video", row, tile, at) for row in range(rows)])

    def feed(
        self, keys: Tensor, values: Tensor, query: Tensor, layer: int = 0, seen_as: Tensor | None = None
    ) -> Tensor:
        """``keys``, ``values [B, Hkv, q, D]`` of new tokens reach a layer, and ``query [B, Hq, q, D]`` attends.

        Returns what attention read, ``[B, Hkv, K, D]``. ``seen_as`` replaces the keys that are attended to.
        """
        stored = self.state.layers[layer]
        read, _ = stored.update(keys, values)
        index = stored.index
        assert index is not None
        visible = index.mask(self.forward.phase(layer).places, None)
        shown = read if seen_as is None else seen_as
        scaling = 1.0 if seen_as is not None else keys.shape[3] ** -0.5
        self.run.after_attention(LayerAttended(layer, query, shown, values, visible, scaling, None))
        if layer == len(self.state.layers) - 1:
            self.run.finish()
        return read

    def prompt(self, keys: Tensor, values: Tensor, query: Tensor | None = None) -> Tensor:
        """A prompt of ``keys``, ``values [B, Hkv, K, D]`` in every layer; returns the scores of the last, ``[B, Hkv, K]``.

        ``query [B, Hq, W, D]`` are the last ones; those before them, which nothing looks at, are zero.
        """
        size = keys.shape[2]
        self.begin(size, len(keys))
        full = keys.new_zeros(len(keys), keys.shape[1] if query is None else query.shape[1], size, keys.shape[3])
        if query is not None and query.shape[2]:
            full[:, :, -query.shape[2] :] = query
        for layer in range(len(self.state.layers)):
            self.feed(keys, values, full, layer)
        return self.ranks[-1]

    def layer_counts(self, size: int) -> list[int]:
        """How many keys of a prompt of ``size`` tokens each layer keeps, where the content does not matter."""
        prompt = self.begin(size).prompt
        assert prompt is not None
        return [counts[0] for counts in prompt.tokens.layer_budgets()]

    def positions(self, layer: int = 0) -> list[list[Tensor]]:
        """Per row and head, the places of the keys that are stored."""
        index, heads = self.state.layers[layer].index, self.state.layers[layer].keys.shape[1]
        assert index is not None
        return [[one[one >= 0].long() for one in row.expand(heads, -1)] for row in index.by_head]

    def stored(self, layer: int = 0) -> list[list[tuple[Tensor, Tensor]]]:
        """Per row and head, the keys and values that are stored, in the order of :meth:`positions`."""
        one = self.state.layers[layer]
        assert one.index is not None
        there = (one.index.by_head >= 0).expand(-1, one.keys.shape[1], -1)
        keys, values = one.stored()
        return [
            [(keys[b, h, there[b, h]], values[b, h, there[b, h]]) for h in range(keys.shape[1])]
            for b in range(len(keys))
        ]


def receiving(name: str, figures: Sequence[Tensor], **options: Any) -> Policy:
    """The registered policy, which receives ``figures`` (``[B, Hkv, K]`` of every forward) in place of attention."""
    queue = iter(figures)

    def observe(self: Policy, attention: LayerAttention, before: Tensor) -> Tensor:
        return before + next(queue)

    policy = make(name, {"observe": observe}, **options)
    assert isinstance(policy, Policy)
    return policy
