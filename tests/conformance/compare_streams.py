"""Memories of streams against the authors' numbers: what stays of every layer, and means of the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparators import Arrays, Params, close
from compare_positions import turning
from harness import CacheRun, make, run

from mmaccel.method.guides import RatedKeys
from mmaccel.runtime.cache.guided_eviction import holds_mean
from mmaccel.runtime.cache.rotation import turned


def hermes(params: Params, arrays: Arrays) -> None:
    """The prompt of a stream whose first places are text, over a cache of as many layers."""
    policy = make("hermes", short=params["short_term_ratio"], long=params["long_term_ratio"])
    depth, first, budget = params["num_layers"], params["visual_start"], params["num_keep"]
    names = "local", "global", "mixed"
    paid = [arrays[f"attn_{names[policy.guide(layer, depth)]}"][layer] for layer in range(depth)]
    size = first + len(paid[0])
    cache = CacheRun(
        policy,
        budget,
        layers=depth,
        visual=torch.arange(size) >= first,
        text=turning(10000.0, 16),
        guides_pay=[torch.cat([torch.zeros(first), one])[None] for one in paid],
    )
    cache.begin(size)
    keys = torch.randn(1, 2, size, 16, generator=torch.Generator().manual_seed(0))
    for layer in range(depth):
        cache.feed(keys, keys, keys, layer)
    for layer in range(depth):
        held = set(cache.positions(layer)[0][0].tolist())
        wanted = arrays["keep"][layer]
        wanted = set(wanted[wanted >= 0].tolist())
        assert len(wanted) == arrays["keep_counts"][layer]
        deep = policy.role(layer, depth) == "deep"
        # the mean has the place of the newest key in it
        assert held == wanted | ({max(set(range(size)) - wanted)} if deep else set()), f"layer {layer}"


def fold(params: Params, arrays: Arrays) -> None:
    """What stays of every layer, and its mean; then new positions, where the model has no more. The second row is negative."""
    policy = make("hermes", short=params["short_term_ratio"], long=params["long_term_ratio"])
    depth, text = params["num_layers"], turning(params["rope_base"], arrays["k"].shape[-1])
    folded = []
    for layer, size in enumerate(params["lens"]):
        keys, values = (arrays[name][layer, None, :, :size] for name in ("k", "v"))
        keys, values = (torch.cat([x, -x]) for x in (keys, values))
        kept = arrays["keep"][layer]
        stay = torch.zeros(2, size, dtype=torch.bool)
        stay[:, kept[kept >= 0]] = True
        deep = policy.role(layer, depth) == "deep"
        count = stay.sum(1) + int(deep)
        rated = RatedKeys(layer, depth, stay.float(), stay | ~stay, stay.float(), count, torch.zeros_like(stay).long())
        at, means = arrays["positions"][layer, :size].expand(1, 2, -1), policy.fold(rated)
        assert (means is not None) == deep
        if means is not None:
            keys, values, at = run("fold_keys", text, keys, values, at, stay, means)
            stay = stay | holds_mean(means.onto)
        folded.append((keys, values, at, stay))
    bound = policy.bound(params["max_position_embeddings"])
    due = max(int(at[0][stay].max()) for _, _, at, stay in folded) > bound
    for layer, (keys, values, at, stay) in enumerate(folded):
        if due:
            new = run("reindexed", at, stay, stay.sum(1))
            keys, at = turned(text, keys, (new - at).masked_fill(~stay, 0)[:, :, None]), new
        slots = stay[0].nonzero()[:, 0]
        slots = slots[at[0, 0, slots].argsort()]
        total = int(arrays["out_lens"][layer])
        assert at[0, 0, slots].tolist() == arrays["out_positions"][layer, :total].tolist()
        close(keys[0][:, slots], arrays["out_k"][layer, :, :total])
        close(values[0][:, slots], arrays["out_v"][layer, :, :total])


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    (
        "haowei-freesky/HERMES",
        "inference/llavaov_online_official.py:LlavaOneVision_Hermes.prune_kv_cache_by_attention",
    ): hermes,
    (
        "haowei-freesky/HERMES",
        "inference/llavaov_online_official.py:LlavaOneVision_Hermes._shrink_positions_and_rerotate_keys",
    ): fold,
}
