"""Recipes of every policy and schedule, and what a cache stores after each step: shared by the tests of the cache."""

from __future__ import annotations

from typing import Any

import torch
import zoo
from laws import oracle
from torch import Tensor

import mmaccel
from mmaccel import Recipe, Stage, accelerated

FAMILIES = ("llava", "qwen2_5_vl", "smolvlm")


def stage(method: str, retain: float | None = 0.3, **options: Any) -> Recipe:
    if method == "snapkv":
        options = {"window": 8, **options}
    text_retain = options.pop("text_retain", None)
    return Recipe(method, (Stage(method, retain, options),), text_retain=text_retain)


#: what is evicted at the end of the prompt: every policy as it comes, and in all the other ways there are
RECIPES = {
    **{name: oracle.recipe(name, "llava") for name in oracle.policies_that_drop()},
    "vl-cache-shared": stage("vl-cache", per_head=False, layer_budget="sparsity:0.8"),
    "a2sf-recent": stage("a2sf", recent=2),
    "vatp-sinks": stage("vatp", sinks=2),
    "lagkv-short": stage("lagkv", lag=4),
    "elastic-evict": stage("elastic-cache", compact="evict"),
    "pyramid": stage("snapkv", layer_budget="pyramid"),
    "adaptive": stage("snapkv", head_budget="adaptive"),
    "concentrated": stage("h2o", head_budget="concentrated:0.1"),
    "safeguard": stage("h2o", head_budget="safeguard:0.5"),
    "prefix-adaptive": stage("h2o", layer_budget="prefix", head_budget="adaptive:0"),
    "variance": stage("h2o", layer_budget="variance"),
    "squeeze": stage("h2o", layer_budget="squeeze:0.2"),
    "entropy": stage("h2o", layer_budget="entropy"),
    "criticalkv-narrow": stage("criticalkv", window=4),
    "windowkv-narrow": stage("windowkv", window=4, width=3),
    "windowkv-average": stage("windowkv", window=4, width=3, strategy="average", layer_budget="uniform", joint=True),
    "chunks": stage("snapkv", neighbours=3),
    "joint": stage("h2o", joint=True, sinks=2, recent=0.1),
    "text": stage("snapkv", text_retain=0.5, text_policy="knorm", protect=("question", "separators")),
}


def by_hand(how: str, keys: Tensor, x: Tensor, kept: Tensor, gone: Tensor) -> Tensor:
    """One head, ``[K, D]``: the definition, key by key."""
    out, flows = x.clone(), []
    anchors = kept.nonzero()[:, 0].tolist()
    for source in gone.nonzero()[:, 0].tolist():
        if how == "nearest":
            pivot, cosine = min(anchors, key=lambda a: (abs(a - source), a)), 1.0
        else:
            cosines = [float(torch.cosine_similarity(keys[source], keys[a], dim=0)) for a in anchors]
            pivot, cosine = anchors[cosines.index(max(cosines))], max(cosines)
        flows.append((source, pivot, cosine))
    bar = sum(c for *_, c in flows) / max(1, len(flows))
    for pivot in anchors:
        parts = [x[pivot]]
        for source, onto, cosine in flows:
            if onto != pivot:
                continue
            if how in ("pivot", "nearest"):
                parts.append((x[source] + x[pivot]) / 2 if how == "pivot" else x[source])
            elif cosine >= bar:
                parts.append(x[source] * (1.0 if how == "average" else cosine))
        out[pivot] = torch.stack(parts).mean(0)
    if how == "blend":
        for pivot in anchors:
            mine = [(s, (c + 1) / 2) for s, onto, c in flows if onto == pivot]
            total = 1 + sum(w for _, w in mine)
            out[pivot] = (x[pivot] + sum((w * x[s] for s, w in mine), torch.zeros_like(x[0]))) / total
    return out


#: what goes while decoding: every policy in the same way, but those that score for queries to come, and others with more to it
# by choice: the others are those of the registry
SCHEDULES = {
    **{
        f"{name}-each": oracle.recipe(name, "llava", every=2, joint=True, recent=1)
        for name in oracle.policies_that_drop()
        if not mmaccel.get_method(name)().prompt_only
    },
    # its newest keys stay, too: fewer of them than are written between two evictions
    "rpc-each": stage("rpc", every=4, joint=True, recent=1, window=2),
    "h2o": stage("h2o", every=1, joint=True, recent=4),
    "h2o-text": stage("h2o", every=1, text_retain=0.5, recent=2),
    "h2o-visual": stage("h2o", every=1),
    "every-3": stage("h2o", every=3, joint=True, recent=2),
    "streaming-llm": stage("streaming-llm", every=1, text_retain=1.0, sinks=2),
    "snapkv": stage("snapkv", every=2, joint=True, window=3),
    "adaptive": stage("h2o", every=1, joint=True, head_budget="adaptive:0", recent=1),
    "tova": stage("tova", every=1, joint=True),
    "a2sf": stage("a2sf", every=1, joint=True, recent=2, forget=0.5),
    "cap": stage("knorm", cap=20, joint=True),
    "layers": stage("h2o", every=2, joint=True, layer_budget="pyramid:2", sinks=2, recent=4),
    "elastic": stage("elastic-cache", every=1, joint=True, compact="evict", distance=-3, growth=0.5),
    "vl-cache": stage("vl-cache", every=2, text_retain=0.9),
    "criticalkv": stage("criticalkv", every=2, joint=True, head_budget="adaptive", window=4),
    "windowkv": stage("windowkv", every=2, joint=True, window=3, width=2),
}


def places(cache: Any, total: int) -> Tensor:
    """``[L, B, Hkv, total]`` bool: which places each head stores."""
    out = []
    for layer in cache.layers:
        index = layer.index.index.long()
        index = index if index.dim() == 3 else index[:, None].expand(-1, layer.keys.shape[1], -1)
        held = torch.zeros(*index.shape[:2], total + 1, dtype=torch.bool)
        out.append(held.scatter_(2, index.masked_fill(index < 0, total), True)[..., :total])
    return torch.stack(out)


def step_by_step(family: str, feed: Any, recipe: Recipe, forced: Tensor) -> tuple[Tensor, list[Tensor], Any]:
    """A loop of the caller's own: logits of every step, and what is stored after each."""
    total = feed["input_ids"].shape[1] + forced.shape[1]
    logits, held = [], []
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        out = model(**feed, use_cache=True)
        cache = out.past_key_values
        for token in forced.T:
            logits.append(out.logits[:, -1])
            held.append(places(cache, total))
            out = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            assert model.mmaccel.stats()["kv_bytes"] == cache.mmaccel.nbytes()
    logits.append(out.logits[:, -1])
    held.append(places(cache, total))
    return torch.stack(logits, dim=1), held, cache


def replay_steps(family: str, feed: Any, forced: Tensor, held: list[Tensor], **overrides: Any) -> Tensor:
    """The bare model in one forward, where the query of every step sees what was stored before it, and itself."""
    model = oracle.replayer(family, **overrides)
    padded = torch.cat([forced, forced[:, :1]], dim=1)
    whole, length = oracle.continued(family, feed, padded), feed["input_ids"].shape[1]
    config = model.config.get_text_config()
    groups = config.num_attention_heads // config.num_key_value_heads
    valid = whole["attention_mask"].bool()
    size = valid.shape[1]
    for number, layer in enumerate(oracle.text_model(model).layers):
        mask = torch.ones(size, size, dtype=torch.bool).tril() & valid[:, None]
        mask = mask[:, None].repeat(1, config.num_key_value_heads, 1, 1)
        for step in range(forced.shape[1]):
            mask[:, :, length + step] = held[step][number][..., :size]
        mask |= torch.eye(size, dtype=torch.bool)
        if (window := oracle.window_of(config, number)) is not None:
            mask &= torch.ones(size, size, dtype=torch.bool).triu(1 - window)
        layer.self_attn.visible = mask.repeat_interleave(groups, dim=1)
    return model(**whole, use_cache=False).logits[:, length - 1 :]
