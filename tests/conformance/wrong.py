"""Registered methods made wrong by one place: a comparison that still passes does not look at what they choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from harness import FUNCTIONS, Compare, made
from torch import Tensor

from mmaccel.core.reduction import Links, Reduction
from mmaccel.decoding.base import Drafter
from mmaccel.decoding.drafters import DRAFTERS
from mmaccel.decoding.tree import StaticTree
from mmaccel.kv.codecs.base import Codec
from mmaccel.method import (
    EncoderMethod,
    EncoderTokens,
    ExpertMethod,
    FrameMergingMethod,
    FramesMethod,
    KeyBatch,
    Method,
    Observed,
    PatchMethod,
    Policy,
    ReadingPolicy,
    ReadStep,
    RebuildingMethod,
    RecallPolicy,
    RetracingMethod,
    ReuseMethod,
    TokenBatch,
    TokenMethod,
    registry,
)
from mmaccel.method.calibration import HeadPolicy


def shifted(kind: type[Method]) -> dict[str, Any]:
    """What a method does with its choice moved by one place."""

    def reduce(self: TokenMethod, tokens: TokenBatch, count: Tensor) -> Reduction:
        made, n = kind.reduce(self, tokens, count), tokens.valid.shape[1]  # type: ignore[attr-defined]
        links = made.links
        if links is not None:
            links = Links(links.batch, (links.slot + 1) % n, (links.source + 1) % n, links.weight).sorted(n)
        return Reduction(made.kept.roll(1, 1), made.valid, links)

    def predict(self: PatchMethod, pixels: Tensor) -> Tensor:
        return kind.predict(self, pixels).roll(1, -1)  # type: ignore[attr-defined]

    def recompute(self: ReuseMethod, keys: Tensor, stored: Tensor) -> Tensor:
        return ((kind.recompute(self, keys, stored) + 1) % keys.shape[1]).sort().values  # type: ignore[attr-defined]

    def merge(self: FrameMergingMethod, frames: Tensor) -> Tensor:
        # a frame too few
        return kind.merge(self, frames)[:-1]  # type: ignore[attr-defined,no-any-return]

    def choose_patches(self: RebuildingMethod, before: Tensor, now: Tensor) -> Tensor:
        return ((kind.choose(self, before, now) + 1) % len(now)).sort().values  # type: ignore[attr-defined]

    def is_uncertain(self: RetracingMethod, logits: Tensor) -> Tensor:
        return ~kind.is_uncertain(self, logits)  # type: ignore[attr-defined,no-any-return]

    def retrace(self: RetracingMethod, hidden: Tensor, *others: Any) -> Tensor:
        return kind.retrace(self, hidden.roll(1, -1), *others)  # type: ignore[attr-defined,no-any-return]

    def uses(self: ExpertMethod, weights: Tensor, *others: Any) -> Tensor:
        return kind.uses(self, weights, *others).roll(1, -1)  # type: ignore[attr-defined,no-any-return]

    def match(self: EncoderMethod, tokens: EncoderTokens, remove: int) -> Tensor:
        def roll(x: Tensor) -> Tensor:
            return torch.cat([x[:, : tokens.protected], x[:, tokens.protected :].roll(1, 1)], 1)

        seen = None if tokens.cls_attention is None else roll(tokens.cls_attention)
        return kind.match(self, replace(tokens, keys=roll(tokens.keys), cls_attention=seen), remove)  # type: ignore[attr-defined]

    def schedule(self: EncoderMethod, tokens: int, layers: int, kept: int) -> list[int]:
        made = kind.schedule(self, tokens, layers, kept)  # type: ignore[attr-defined]
        return made[1:] + made[:1]

    def score(self: Policy, keys: KeyBatch) -> Tensor:
        return kind.score(self, keys).roll(1, -1)  # type: ignore[attr-defined]

    def full_heads(self: HeadPolicy) -> Mapping[int, Tensor]:
        heads = dict(kind.full_heads(self))  # type: ignore[attr-defined]
        layer = min(heads)
        heads[layer] = torch.cat([~heads[layer][:1], heads[layer][1:]])
        return heads

    def recall(self: Policy, paid: Tensor, *others: Any) -> Tensor:
        return kind.recall(self, paid.roll(1, -1), *others)  # type: ignore[attr-defined]

    def recall_by_logits(self: Policy, logits: Tensor, *others: Any) -> Tensor:
        return kind.recall_by_logits(self, logits.roll(getattr(self, "block", 1), -1), *others)  # type: ignore[attr-defined]

    def rate(self: ReadingPolicy, step: ReadStep) -> Tensor:
        return kind.rate(self, step).roll(1, -1)  # type: ignore[attr-defined]

    def level(self: ReadingPolicy, layers: Sequence[Observed], share: Tensor) -> Tensor:
        moved = [replace(layer, queries=layer.queries.roll(1, -1)) for layer in layers]
        return kind.level(self, moved, share)  # type: ignore[attr-defined]

    def choose(self: RecallPolicy, query: Tensor, frames: Tensor) -> Tensor:
        return kind.choose(self, query, frames) + 1  # type: ignore[attr-defined]

    def moved(self: Any, *given: Any) -> list[int]:
        return [one + 1 for one in kind.moved(self, *given)]  # type: ignore[attr-defined]

    def pack(self: Codec, keys: Tensor, values: Tensor, lengths: Tensor, *others: Any, **named: Any) -> Any:
        if named.get("query_energy") is not None:
            named["query_energy"] = named["query_energy"].roll(1, -1)
        return kind.pack(self, keys.roll(1, 0), values.roll(1, 0), lengths, *others, **named)  # type: ignore[attr-defined]

    def pick(self: FramesMethod, frames: np.ndarray, count: int) -> np.ndarray:
        return (kind.pick(self, frames, count) + 1) % len(frames)  # type: ignore[attr-defined]

    if issubclass(kind, ReadingPolicy):
        return {"rate": rate, "level": level} if kind.window else {"rate": rate}
    if issubclass(kind, RecallPolicy):
        return {"choose": choose, "moved": moved} if hasattr(kind, "moved") else {"choose": choose}
    if issubclass(kind, Policy) and kind.sees_logits:
        return {"recall_by_logits": recall_by_logits}
    if issubclass(kind, HeadPolicy):
        # all keys of a head have one score
        return {"full_heads": full_heads}
    if issubclass(kind, Policy):
        return {"recall": recall, "score": score} if kind.recall is not Policy.recall else {"score": score}
    if issubclass(kind, TokenMethod):
        return {"reduce": reduce}
    if issubclass(kind, ReuseMethod):
        return {"recompute": recompute}
    if issubclass(kind, PatchMethod):
        return {"predict": predict}
    if issubclass(kind, FrameMergingMethod):
        return {"merge": merge}
    if issubclass(kind, RebuildingMethod):
        return {"choose": choose_patches}
    if issubclass(kind, ExpertMethod):
        return {"uses": uses}
    if issubclass(kind, RetracingMethod):
        return {"is_uncertain": is_uncertain, "retrace": retrace}
    if issubclass(kind, EncoderMethod):
        return {"match": match, "schedule": schedule}
    return {"pack": pack} if issubclass(kind, Codec) else {"pick": pick}


def level(kind: type[Method]) -> dict[str, Any]:
    """A policy that gives every layer the same, whatever it is told."""

    def choice(self: Policy, option: str) -> tuple[str, float | None]:
        return ("uniform", None) if option == "layer_budget" else kind.choice(self, option)  # type: ignore[attr-defined]

    return {"choice": choice}


def other_tokens(kind: type[Drafter]) -> type[Drafter]:
    """A drafter whose tokens are the next larger ones, whichever of its methods makes them."""

    def wrong(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = getattr(kind, name)(*args)
            if isinstance(found, list):
                return [token + 1 for token in found]
            return found._replace(tokens=[token + 1 for token in found.tokens])

        return call

    changed = {name: wrong(name) for name in ("draft", "copy", "tree", "best") if hasattr(kind, name)}
    return type(kind.__name__, (kind,), changed)


def rolled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function on the rows of a batch that gives every row what its neighbour gets."""

    def call(*args: Any) -> Any:
        found = function(*args)
        if isinstance(found, StaticTree):
            found.index = [place + 1 for place in found.index]
            return found
        if isinstance(found, list):
            return found[:-1] or [0]
        if type(found) is tuple and all(isinstance(one, Tensor) for one in found):
            return tuple(one.roll(1, 0) for one in found)
        if type(found) is tuple:
            number, left = found
            return (None if number else 0), left.roll(1, 0)
        return found.roll(1, 0) if isinstance(found, Tensor) else type(found)(*(one.roll(1, 0) for one in found))

    return call


@contextmanager
def registered(change: Any) -> Iterator[None]:
    """Every method of the registry changed, and all drafters and functions."""
    before = dict(registry.methods())
    drafters, functions = dict(DRAFTERS), dict(FUNCTIONS)
    changed = {name: type(kind.__name__, (kind,), change(kind)) for name, kind in before.items() if change(kind)}
    registry._methods.update(changed)
    DRAFTERS.update({name: other_tokens(kind) for name, kind in drafters.items()})
    FUNCTIONS.update({name: rolled(function) for name, function in functions.items()})
    try:
        yield
    finally:
        registry._methods.update(before)
        DRAFTERS.update(drafters)
        FUNCTIONS.update(functions)


def notices(compare: Compare, params: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> bool:
    """Whether a comparison that has just passed fails when the methods it made are wrong."""
    known = registry.methods()
    policies = all(name in known and issubclass(known[name], Policy) for name in made)
    for change in (shifted, level) if policies else (shifted,):
        with registered(change):
            try:
                compare(params, arrays)
            except AssertionError:
                return True
    return False
