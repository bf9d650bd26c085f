"""Cache policies, budgets and compactors against the authors' numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from comparators import Arrays, Fault, NotBuilt, Params, close, key_batch, rotate, same_keys, same_rows, same_set
from compare_merging import film_of
from torch import Tensor

from mmaccel.kv import budgets
from mmaccel.kv.compact import merge
from mmaccel.kv.eviction import choose, per_head, rank
from mmaccel.kv.importance import by_group, expected_queries, outgoing_norm
from mmaccel.kv.policies.a2sf import A2SF
from mmaccel.kv.policies.criticalkv import CriticalKV
from mmaccel.kv.policies.dycoke_cache import DyCokeCache
from mmaccel.kv.policies.elastic_cache import ElasticCache
from mmaccel.kv.policies.expected_attention import ExpectedAttention
from mmaccel.kv.policies.h2o import H2O
from mmaccel.kv.policies.infinipot_v import InfiniPotV
from mmaccel.kv.policies.keydiff import KeyDiff
from mmaccel.kv.policies.knorm import KNorm
from mmaccel.kv.policies.lagkv import LagKV
from mmaccel.kv.policies.observed_attention import ObservedAttention
from mmaccel.kv.policies.snapkv import SnapKV
from mmaccel.kv.policies.tova import Tova
from mmaccel.kv.policies.vatp import VATP
from mmaccel.kv.policies.vl_cache import VLCache
from mmaccel.kv.policies.windowkv import WindowKV
from mmaccel.layers.fastkv import FastKVTokens
from mmaccel.merging.dycoke import DyCoke
from mmaccel.method import KeyBatch, LayerAttention, Policy
from mmaccel.reduction import top_mask


# --- building inputs, comparing outputs -------------------------------------------------------------------------------
def bare_batch(keys: Tensor, values: Tensor, received: Tensor | None = None, queries: Tensor | None = None) -> KeyBatch:
    """Keys ``[B, H, K, D]`` without padding, none of them visual."""
    shape = (len(keys), keys.shape[2])
    return KeyBatch(
        keys=keys,
        values=values,
        queries=keys.new_zeros(len(keys), keys.shape[1], 0, keys.shape[3]) if queries is None else queries,
        valid=torch.ones(shape, dtype=torch.bool),
        visual=torch.zeros(shape, dtype=torch.bool),
        index=torch.arange(shape[1]).expand(shape),
        scaling=keys.shape[3] ** -0.5,
        received=received,
    )


def causal(query: Tensor, key: Tensor) -> LayerAttention:
    text = torch.ones(len(query), query.shape[2], dtype=torch.bool)
    return LayerAttention(query, key, None, query.shape[3] ** -0.5, text)


def joint(policy: Policy, batch: KeyBatch, count: int) -> Tensor:
    """``[B, H, K]`` bool: the ``count`` best of all keys, protected ones first."""
    return choose(policy, rank(policy, batch), batch.valid, torch.full((len(batch.valid),), count))


def same_positions(kept: Tensor, theirs: Tensor) -> None:
    """``kept [B, H, K]`` bool against positions ``[B, H, n]``."""
    for ours, positions in zip(kept.flatten(0, 1), theirs.flatten(0, 1), strict=True):
        same_set(ours.nonzero()[:, 0], positions)


def compacted(x: Tensor, kept: Tensor) -> Tensor:
    """``x [B, H, K, ...]`` where heads keep equally many."""
    return x[kept].unflatten(0, (*x.shape[:2], -1))


def last_queries(params: Params, arrays: Arrays) -> Tensor:
    """kvpress makes queries of hidden states; those of the window, after RoPE."""
    keys, window = arrays["in_k"], params.get("window_size", 32)
    hidden = arrays["in_hidden"][:, -window:]
    queries = (hidden @ arrays["in_wq"].T).unflatten(2, (-1, keys.shape[3])).transpose(1, 2)
    return rotate(queries, keys.shape[2] - window)


# --- accumulated attention --------------------------------------------------------------------------------------------
def h2o(params: Params, arrays: Arrays) -> None:
    """Prefill, then one key and one eviction a step: the machine of the recipe, by hand."""
    size = params["hh_size"] + params["recent_size"]
    policy = H2O(recent=params["recent_size"])
    keys, values = arrays["in_k"], arrays["in_v"]
    index = torch.arange(keys.shape[2]).expand(keys.shape[:3])
    received, step = torch.zeros(keys.shape[:3]), 0
    query = arrays["in_q"]
    while True:
        received = policy.observe(causal(query, keys), received)
        kept = joint(policy, bare_batch(keys, values, received), size)
        keys, values, received, index = (compacted(x, kept) for x in (keys, values, received, index))
        assert torch.equal(index, arrays[f"out_positions_{step}"])
        close(received[0], arrays[f"out_score_{step}"])
        if f"out_positions_{step + 1}" not in arrays:
            return
        query = arrays["in_dq"][step]
        keys = torch.cat([keys, arrays["in_dk"][step]], dim=2)
        values = torch.cat([values, arrays["in_dv"][step]], dim=2)
        received = torch.cat([received, received.new_zeros(*received.shape[:2], 1)], dim=2)
        index = torch.cat([index, torch.full_like(index[..., :1], arrays["in_k"].shape[2] + step)], dim=2)
        step += 1


def a2sf(params: Params, arrays: Arrays) -> None:
    policy, keys = A2SF(forget=params["forgetting_factor"], recent=params["recent_budget"]), arrays["in_k"]
    age = torch.arange(keys.shape[2] - 1, -1, -1)
    close(policy.forget**age, arrays["out_query_weights"])
    received = policy.observe(causal(arrays["in_q"], keys), torch.zeros(keys.shape[:3]))
    close(received, arrays["out_scores"])
    kept = joint(policy, bare_batch(keys, keys, received), params["total_budget"])
    same_positions(kept, arrays["out_positions"])


def vatp(params: Params, arrays: Arrays) -> None:
    """The prompt, and a step that sees what is left; theirs masks, so that places stay."""
    heavy, recent = params["heavy_budget"], params["recent_budget"]
    weighed = params["applyval"]
    policy = VATP(recent=recent, sinks=params["sink_len"]) if weighed else H2O(recent=recent)
    keys, values, total = arrays["in_k"], arrays["in_v"], arrays["in_k"].shape[2]
    index = torch.arange(total).expand(keys.shape[:3])
    received = policy.observe(causal(arrays["in_q"], keys), torch.zeros(keys.shape[:3]))
    if not params["h2o"] and total > 400:
        raise NotBuilt("scores of the last 400 queries")
    query = arrays["in_dq"]
    for step in (0, 1):
        kept = joint(policy, bare_batch(keys, values, received), heavy + recent)
        keys, values, received, index = (compacted(x, kept) for x in (keys, values, received, index))
        # theirs decides for the next step, whose own key always stays
        theirs = arrays["out_keep_next" if step == 0 else "out_keep_next_1"][None, ..., : total + step]
        same_positions(theirs, index)
        if step == 1:
            return
        if "out_out_1" not in arrays:
            return
        keys = torch.cat([keys, arrays["in_dk"]], dim=2)
        values = torch.cat([values, arrays["in_dv"]], dim=2)
        paid = causal(query, keys).attention(0, 1)
        close((paid @ values)[0, :, 0].flatten(), arrays["out_out_1"])
        received = torch.cat([received, torch.zeros_like(received[..., :1])], dim=2)
        received = policy.observe(causal(query, keys), received)
        index = torch.cat([index, torch.full_like(index[..., :1], total)], dim=2)


def observed_attention(params: Params, arrays: Arrays) -> None:
    keys = arrays["in_k"] if "in_k" in arrays else None
    sums = arrays["in_attn_colsum"]
    if keys is None:
        heads = arrays["out_score"].shape[1]
        keys = torch.zeros(1, heads, sums.shape[2], 1)
    policy = ObservedAttention()
    score = policy.score(bare_batch(keys, keys, by_group(sums, keys.shape[1], policy.gqa)))
    close(score, arrays["out_score"])
    if "out_kept" in arrays:
        same_keys(score, max(1, int(sums.shape[2] * (1 - params["compression_ratio"]))), arrays["out_kept"])


# --- LOOK-M, D2O, Elastic Cache ---------------------------------------------------------------------------------------
def lookm(how: str, text_first: bool) -> Callable[[Params, Arrays], None]:
    """Text stays, visual keys fill up the heavy hitters; without text, the first four stay."""

    def compare(params: Params, arrays: Arrays) -> None:
        keys, values, total = arrays["in_k"], arrays["in_v"], arrays["in_k"].shape[2]
        heavy, recent = (int(total * params[name]) for name in ("hh_ratio", "recent_ratio"))
        batch = replace(
            bare_batch(keys, values, arrays["in_score"][None]), visual=arrays["in_visual_mask"].expand(1, -1)
        )
        if text_first:
            text = ~batch.visual
            room = max(0, heavy - int(text[:, : total - recent].sum())) + int(batch.visual[:, total - recent :].sum())
            policy = H2O(recent=recent)
            scores = rank(policy, batch)
            # everything in the window stays, text or not
            kept = choose(policy, scores, batch.visual, torch.tensor([room])) | text[:, None]
        else:
            kept = joint(H2O(recent=recent, sinks=0 if how == "evict" else 4), batch, heavy + recent)
        # theirs pushes visual scores below text by 65516, where float32 has steps of 1/128: close ones tie
        rounded = batch.received - 65516
        chosen = torch.zeros_like(kept).scatter_(2, arrays["out_positions"], True)
        for ours, theirs, score in zip(kept[0], chosen[0], rounded[0], strict=True):
            only_ours, only_theirs = score[ours & ~theirs].sort().values, score[theirs & ~ours].sort().values
            assert torch.equal(only_ours, only_theirs) and (text_first or not len(only_ours))
        kept = chosen
        if how == "average":
            raise Fault("average merging pairs keys with the pivots of others: rows are filtered, indices are not")
        made_keys, made_values = keys, values
        if how != "evict":
            made = merge(how, keys, values, kept, ~kept, by_rank=True)
            made_keys, made_values = made.keys, made.values
        close(compacted(made_keys, kept), arrays["out_k"])
        close(compacted(made_values, kept), arrays["out_v"])

    return compare


def lookm_port(params: Params, arrays: Arrays) -> None:
    """A port for grouped queries: exactly as many keys as the budget says, text first."""
    keys, values, total = arrays["in_k"], arrays["in_v"], arrays["in_k"].shape[2]
    heavy, recent = (int(total * params["budget"] * share) for share in (0.9, 0.1))
    received = by_group(arrays["in_colsum"], keys.shape[1], "mean")
    received = received - 10000.0 * arrays["in_visual_mask"]
    kept = joint(H2O(recent=recent), bare_batch(keys, values, received), heavy + recent)
    same_positions(kept, arrays["out_positions"])
    made = merge("pivot", keys, values, kept, ~kept)
    close(compacted(made.keys, kept), arrays["out_k"])
    close(compacted(made.values, kept), arrays["out_v"])


def d2o(params: Params, arrays: Arrays) -> None:
    keys, values = arrays["in_k"], arrays["in_v"]
    heavy, recent = (int(keys.shape[2] * params[name]) for name in ("hh_ratio", "recent_ratio"))
    policy = H2O(recent=recent, sinks=params["protected_first"])
    decay, received, threshold = params["alpha"], arrays["in_score"][None], None
    assert decay + params["belta"] == 1
    for step in (0, 1):
        kept = joint(policy, bare_batch(keys, values, received), heavy + recent)
        made = merge("ema", keys, values, kept, ~kept, decay=decay, threshold=threshold, by_rank=True)
        threshold = made.threshold
        keys, values, received = (compacted(x, kept) for x in (made.keys, made.values, received))
        close(keys, arrays[f"out_k_{step}"])
        close(values, arrays[f"out_v_{step}"])
        assert threshold is not None
        close(threshold[0, 0], arrays[f"out_threshold_{step}"])
        protected = params["protected_first"]
        # theirs writes the protection into the sums
        close(received[0, :, protected:], arrays[f"out_score_{step}"][:, protected:])
        if step == 0:
            keys = torch.cat([keys, arrays["in_dk"]], dim=2)
            values = torch.cat([values, arrays["in_dv"]], dim=2)
            received = torch.cat([received, torch.zeros_like(received[..., :1])], dim=2) + arrays["in_score_1"][None]


def elastic_cache(params: Params, arrays: Arrays) -> None:
    keys, values, total = arrays["in_k"], arrays["in_v"], params["num_of_token"]
    start, distance = params["start_size"], params["distance"]
    policy = ElasticCache(faithful=True, joint=True, distance=distance, every=1)
    forget = int(total - total * (1 - params["ratio"]))
    inner = slice(start, total - 1)
    received = arrays["in_score_sum"][:, None].expand(keys.shape[:3])
    middle = bare_batch(keys[:, :, inner], values[:, :, inner], received[..., inner])
    count = total - 1 - start - (forget + 1)
    kept = torch.ones(keys.shape[:3], dtype=torch.bool)
    kept[..., inner] = joint(policy, middle, count)
    for layer, positions in zip(kept, arrays["out_positions"], strict=True):
        for head in layer:
            same_set(head.nonzero()[:, 0], positions)
    # theirs counts dropped keys from the start of the middle, and the last key takes up nothing
    gone = torch.zeros_like(kept)
    gone[..., : total - 1 - start] = ~kept[..., inner]
    anchors = kept.clone()
    anchors[..., -1] = False
    made = merge("nearest", keys, values, anchors, gone)
    ours = compacted(made.keys, kept)
    close(ours, arrays["out_k"])
    close(compacted(made.values, kept), arrays["out_v"])

    # while decoding: a step that drops nothing, or the slot at the distance
    grown = torch.cat([ours, arrays["in_new_k"]], dim=2)
    drops = int(grown.shape[2] - (total + 1) * (1 - params["ratio"]))
    if drops == 0:
        close(grown, arrays["out_decode_k"])
        grown = torch.cat([grown, grown[:, :, -1:]], dim=2)
    batch = replace(bare_batch(grown, grown, torch.zeros(grown.shape[:3])), decoding=True)
    slot = policy.score(batch).argmin(-1)
    assert (slot == arrays["out_decode_selected_idx"]).all()
    if drops == 1:
        stays = torch.ones(grown.shape[:3], dtype=torch.bool).scatter_(2, slot[..., None], False)
        close(compacted(grown, stays), arrays["out_decode_k"])


# --- VL-Cache, PyramidKV, PrefixKV, Ada-KV ----------------------------------------------------------------------------
def vl_cache(params: Params, arrays: Arrays) -> None:
    sums, ratio, total = arrays["in_importance"], params["alpha"], params["tokens"]
    rows = params["post_vision_queries"]
    entries = sum(total - rows + 1 + i for i in range(rows))
    seen = arrays["in_nonzero"].double().mean(1) / entries
    close(1 - seen, arrays["out_sparsity"])
    # nine tenths of the budget are for the best keys, a tenth for the newest
    if params["different_window_per_layer"]:
        raise NotBuilt("a window of its own for every layer")
    share = torch.full_like(seen, ratio * 0.9)
    if params["layer_adaptive"]:
        share = budgets.sparsity_ratios(seen, ratio * 0.9)
    share = share.float()
    close(share, arrays["out_budget"])
    recent = int(0.1 * ratio * total)
    for layer, per_layer in enumerate(sums):
        theirs = arrays[f"out_positions_l{layer}"][None]
        heads = theirs.shape[1]
        policy = VLCache(per_head=params["head_adaptive"], recent=recent)
        keys = torch.zeros(1, heads, total, 1)
        count = max(1, int(share[layer] * total)) + recent
        kept = joint(policy, bare_batch(keys, keys, by_group(per_layer, heads, "sum")), count)
        same_positions(kept, theirs)


def pyramid_lengths(params: Params, arrays: Arrays) -> None:
    assert arrays
    for case, theirs in arrays.items():
        found = re.fullmatch(r"out_L(\d+)_cap(\d+)_w(\d+)_q(\d+)_b(\d+)", case)
        assert found is not None
        layers, capacity, window, size, beta = map(int, found.groups())
        assert budgets.pyramid_official(capacity, window, size, layers, beta) == theirs.tolist()


def pyramid_kvpress(params: Params, arrays: Arrays) -> None:
    assert arrays
    tokens, window = params["tokens"], params["window_size"]
    for case, theirs in arrays.items():
        count = round(tokens * (1 - int(case.rpartition("_")[2]) / 100))
        sizes = [tokens - window] * params["layers"]
        assert budgets.pyramid(count, sizes, params["beta"], window) == theirs.tolist()


def meda(params: Params, arrays: Arrays) -> None:
    """The split over layers; the entropies in it are of attention that the vector does not hold."""
    ratios = budgets.entropy_ratios(arrays["in_entropy"], params["rho"])
    close(ratios, arrays["out_layer_ratio"])
    # the split that a recipe makes gives every layer a hundredth first, and is exact
    size = 100_000
    shares = arrays["in_entropy"].exp().tolist()
    exact = budgets.by_shares(round(params["rho"] * size), [size] * params["layers"], shares)
    assert max(abs(n / size - float(r)) for n, r in zip(exact, arrays["out_layer_ratio"], strict=True)) < 0.015
    assert sum(exact) == round(params["rho"] * size) * params["layers"]


def prefix_kv(params: Params, arrays: Arrays) -> None:
    scores, cases = arrays["in_score"], [name for name in arrays if name.startswith("out_forget_")]
    assert cases
    for case in cases:
        target = int(scores.numel() * int(case.rpartition("_")[2]) / 100)
        theirs = arrays[case].tolist()
        assert budgets.prefix_official(scores, target, params["protect"]) == theirs
        # ours carries the search to its end: within the 5 keys at which theirs stops, and the same share everywhere
        kept = (scores.numel() - target) // len(scores)
        exact = budgets.prefix(list(scores), kept)
        assert sum(exact) == kept * len(scores)
        share = scores.sort(1, descending=True).values.cumsum(1) / scores.sum(1, keepdim=True)
        reached = [float(row[n - 1]) for row, n in zip(share, exact, strict=True)]
        ahead = [float(row[n - 2]) if n > 1 else 0.0 for row, n in zip(share, exact, strict=True)]
        assert max(ahead) <= min(reached)


def adakv(params: Params, arrays: Arrays) -> None:
    window = params["window_size"]
    keys, values = arrays["in_k"], arrays["in_v"]
    policy = SnapKV(
        window=window, kernel=params["kernel_size"], pooling={"avgpool": "avg", "maxpool": "max"}[params["pooling"]]
    )
    scores = policy.score(bare_batch(keys, values, queries=arrays["in_q_window"]))
    among = torch.arange(keys.shape[2])[None] < keys.shape[2] - window
    base = torch.tensor([params["max_capacity_prompt"] - window])
    scores = scores.masked_fill(~among[:, None], -torch.inf)
    rivals = budgets.concentrated(scores, among, base) if params["normalize"] else scores
    counts = budgets.adaptive(rivals, among, base, params["floor"], True)
    assert torch.equal(counts[0] + window, arrays["out_head_lens"].long())
    kept = per_head(scores, among, counts) | ~among[:, None]
    ends = arrays["out_cu_klen"].tolist()
    for head, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        theirs = arrays["out_positions"][first:last]
        same_set(kept[0, head].nonzero()[:, 0], theirs)
        order = theirs.argsort()
        close(keys[0, head, kept[0, head]], arrays["out_k"][first:last][order])
        close(values[0, head, kept[0, head]], arrays["out_v"][first:last][order])


def adakv_kvpress(params: Params, arrays: Arrays) -> None:
    assert params["inner"] == "SnapKV window 32 kernel 5"
    policy = SnapKV(window=32, kernel=5, head_budget=f"safeguard:{params['alpha_safeguard']}")
    batch = key_batch(arrays, last_queries({}, arrays))
    tokens = arrays["in_k"].shape[2]
    count = torch.tensor([int(tokens * (1 - params["compression_ratio"]))])
    kept = choose(policy, policy.score(batch), batch.valid, count)
    assert torch.equal(kept[0], arrays["out_keep_mask"])


# --- keys and values only ---------------------------------------------------------------------------------------------
def infinipot_v(params: Params, arrays: Arrays) -> None:
    keys, values, system, patches = arrays["in_k"], arrays["in_v"], params["system_size"], params["token_per_frame"]
    assert params["inst_size"] == 0 and params["method"] == "infinipot-v"
    layers, heads, total, _ = keys.shape
    policy = InfiniPotV(tar=params["tar_ratio"], recent_frames=params["query_ratio"], pooled=params["adaptive_pooling"])
    rows = params["height_width"]
    at = torch.arange(total - system)
    picture = torch.cat([torch.full((system,), -1), torch.zeros_like(at)])[None]
    columns = patches // rows
    grid = torch.stack([at // patches, at % patches // columns, at % columns], dim=1)
    cells = torch.cat([torch.full((system, 3), -1), grid])[None]
    count = params["compress_frame_num"] * patches
    for layer in range(layers):
        batch = replace(
            bare_batch(keys[layer : layer + 1], values[layer : layer + 1]),
            visual=picture >= 0,
            picture=picture,
            cells=cells,
            count=torch.tensor([count]),
            layer=layer,
            depth=layers,
        )
        kept = per_head(policy.score(batch), batch.visual, torch.tensor([count])) | ~batch.visual[:, None]
        same_positions(kept, arrays["out_positions"][layer : layer + 1])


def scorer(policy: Callable[[Params], Policy]) -> Callable[[Params, Arrays], None]:
    """A scorer of kvpress that sees keys, values, and for a window queries; what must stay has its largest score."""

    def compare(params: Params, arrays: Arrays) -> None:
        ours = policy(params)
        queries = last_queries({"window_size": ours.window}, arrays) if ours.window else None
        score = ours.score(bare_batch(arrays["in_k"], arrays["in_v"], queries=queries))
        theirs, sure = arrays["out_score"], score == torch.inf
        assert not sure.any() or (theirs[sure] == theirs.max()).all()
        close(score[~sure], theirs[~sure])
        if "out_kept" in arrays:
            same_keys(score, max(1, int(score.shape[2] * (1 - params["compression_ratio"]))), arrays["out_kept"])

    return compare


def expected_attention(params: Params, arrays: Arrays) -> None:
    """Queries are made of hidden states; the first keys have the largest score there is."""
    if params["epsilon"]:
        raise NotBuilt(f"expected attention with {params['epsilon']} added to the scores")
    policy = ExpectedAttention(
        sinks=params["n_sink"],
        future=params["n_future_positions"],
        covariance=params["use_covariance"],
        weigh_values=params["use_vnorm"],
    )
    keys, (tokens, width) = arrays["in_k"], arrays["in_k"].shape[2:]
    queries = (arrays["in_hidden"] @ arrays["in_wq"].T).unflatten(2, (-1, width))
    # a rotation turns the first axes of the two halves into its cosines and sines
    turned = rotate(torch.eye(width)[: width // 2].sum(0).expand(1, 1, policy.future, -1), tokens)[0, 0]
    cos, sin = (x.repeat(1, 2)[None] for x in turned.split(width // 2, dim=1))
    there = torch.arange(tokens)[None] >= policy.sinks
    batch = replace(bare_batch(keys, arrays["in_v"]), expected=expected_queries(queries, there, cos, sin))
    ours, theirs = policy.score(batch), arrays["out_score"]
    assert (ours[..., : policy.sinks] == torch.inf).all() and (theirs[..., : policy.sinks] == theirs.max()).all()
    close(ours[..., policy.sinks :], theirs[..., policy.sinks :])
    if "out_kept" in arrays:
        same_keys(ours, max(1, int(tokens * (1 - params["compression_ratio"]))), arrays["out_kept"])


def critical(params: Params, arrays: Arrays) -> None:
    """Around SnapKV; what won the first stage, and the window, has the largest score there is."""
    policy = CriticalKV(joint=True, first=params["first_stage_ratio"], epsilon=params["epsilon"])
    tokens, width = arrays["in_k"].shape[2:]
    count = max(1, int(tokens * (1 - params["compression_ratio"])))
    batch = replace(
        bare_batch(arrays["in_k"], arrays["in_v"], queries=last_queries({}, arrays)),
        outgoing=outgoing_norm(arrays["in_v"], arrays["in_wo"].unflatten(1, (-1, width))),
        count=torch.tensor([count]),
    )
    ours, theirs = policy.score(batch), arrays["out_score"]
    sure = ours == torch.inf
    assert torch.equal(sure, theirs == theirs.max()) and int(sure[0, 0].sum()) == int(count * policy.first)
    close(ours[~sure], theirs[~sure])


def dycoke(params: Params, arrays: Arrays) -> None:
    """Which image keys each step reads; theirs reads everything where the attention is alike."""
    first, length = params["image_token_start_index"], params["image_token_length"]
    policy = DyCokeCache(alike=params["threshold"], as_shipped=True)
    visual = torch.zeros(1, params["cache_len"], dtype=torch.bool)
    visual[:, first : first + length] = True
    count = torch.tensor([int(length * (1 - params["dycoke_p"]))])
    before = chosen = None
    for step, rows in enumerate(arrays["in_attn"]):
        paid = rows.mean(0)[None]
        chosen = policy.recall(paid, before, visual, count, chosen)
        theirs = arrays[f"out_keep_{step}"]
        everything = torch.arange(params["cache_len"])
        same_set((chosen | ~visual)[0].nonzero()[:, 0], theirs if len(theirs) else everything)
        before = paid


def dycoke_frames(params: Params, arrays: Arrays) -> None:
    clip = film_of(arrays["in_features"].unflatten(0, (params["frames"], params["num_tokens_per_frame"])))
    for ratio in params["merging_ratios"]:
        theirs = arrays[f"out_ttm_{round(100 * ratio)}"]
        made = DyCoke(official_tail=True).reduce(clip, torch.tensor([len(theirs)]))
        same_rows(made.apply(clip.features)[0], theirs)


def chunkkv(params: Params, arrays: Arrays) -> None:
    found = re.fullmatch(r"SnapKV window (\d+) kernel (\d+)", params["inner"])
    if found is None:
        raise NotBuilt(f"chunks of scores by {params['inner']}")
    policy = SnapKV(window=int(found[1]), kernel=int(found[2]), chunk=params["chunk_length"])
    batch = bare_batch(arrays["in_k"], arrays["in_v"], queries=last_queries({"window_size": policy.window}, arrays))
    kept = joint(policy, batch, len(arrays["out_kept"]))
    for ours in kept[0]:
        same_set(ours.nonzero()[:, 0], arrays["out_kept"])


def windowkv(params: Params, arrays: Arrays) -> None:
    """The first layer of every group chooses for it; theirs drops whole windows until the budget is met."""
    size, suffix, group = params["review_window_size"], params["suffix_size"], params["shared_layers"]
    keys, strategy = arrays["in_k"], params["window_select_strategy"]
    assert strategy == "average" or params["win_max_attn_scores"] == size // 2
    policy = WindowKV(window=suffix, width=size, strategy=strategy)
    batch = bare_batch(keys, keys, queries=arrays["in_q_suffix"])
    score, review = policy.score(batch)[0, 0], keys.shape[2] - suffix
    theirs = arrays["out_layers_budget"].tolist()[::group]
    ours = budgets.pyramid(params["max_capacity_prompt"], [review] * len(theirs), params["beta"] / group)
    # theirs is a row of whole steps
    assert all(abs(a - b) <= 1 for a, b in zip(ours, theirs, strict=True))
    for layer, budget in zip(range(0, params["num_hidden_layers"], group), theirs, strict=True):
        positions = arrays[f"out_positions_l{layer}"]
        assert len(positions) == review - size * -(-(review - budget) // size) + suffix
        assert (score[positions[:-suffix]].diff() <= 0).all(), "windows come in the order of their scores"
        for kept in joint(policy, batch, len(positions))[0]:
            same_set(kept.nonzero()[:, 0], positions)


def fastkv(params: Params, arrays: Arrays) -> None:
    """What is stored, and which tokens go on to deeper layers."""
    if params["pooling"] != "avgpool":
        raise NotBuilt(f"fastkv with {params['pooling']}")
    keys, queries, window = arrays["in_k"], arrays["in_q_window"], params["window_size"]
    total = keys.shape[2]
    shares = params["eviction_mode"] == "proportional"
    capacity = int(total * params["retain_rate"]) if shares else params["max_capacity_prompt"]
    policy = SnapKV(window=window, kernel=params["kernel_size"], gqa="sum")
    same_keys(policy.score(key_batch(arrays | {"in_v": keys}, queries)), capacity, arrays["out_positions"])
    if params["tsp_layer"]:
        method = FastKVTokens(window=window, kernel=params["kernel_size"])
        score = method.look(causal(queries, keys))["window_attention"]
        # theirs counts the window, which always goes on
        among = torch.arange(total)[None] < total - window
        count = int(total * params["tsp_rate"]) if shares else params["tsp_length"]
        kept = top_mask(score, among, torch.tensor([count - window])) | ~among
        same_set(kept[0].nonzero()[:, 0], arrays["out_tsp_indices"][0])


def l2_norm(params: Params, arrays: Arrays) -> None:
    assert params["layer_idx"] not in params["skip_layers"]
    same_keys(
        KNorm().score(bare_batch(arrays["in_k"], arrays["in_v"])),
        params["max_capacity_prompt"],
        arrays["out_positions"],
    )


_LOOKM = {
    "PivotKVCache": "pivot",
    "WeightedMergeKVCache": "weighted",
    "AVGMergeKVCache": "average",
    "H2OKVCache": "evict",
}
_LOOKM_TEXT = {
    "TextPivotMerge": "pivot",
    "TextWeightedMerge": "weighted",
    "TextAVGMergeKVCache": "average",
    "MeanH2OKVCache": "evict",
}

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("FMInference/H2O", "H2OKVCache_LayerWise.__call__"): h2o,
    ("Dirac-Notation/A2SF", "A2SFPolicy.get_query_weights/select"): a2sf,
    ("guozhiyu/vatp", "LlamaAttention_heavy_hitter.forward"): vatp,
    **{("SUSTechBruce/LOOK-M", f"{name}_LayerWise.__call__"): lookm(how, False) for name, how in _LOOKM.items()},
    **{("SUSTechBruce/LOOK-M", f"{name}_LayerWise.__call__"): lookm(how, True) for name, how in _LOOKM_TEXT.items()},
    ("EffiVLM-Bench/EffiVLM-Bench", "LOOK_MCluster.update_kv"): lookm_port,
    ("EffiVLM-Bench/EffiVLM-Bench", "VlCacheKVCluster"): vl_cache,
    ("AIoT-MLSys-Lab/D2O", "D2O_LayerKVCache.__call__"): d2o,
    ("liuzuyan/ElasticCache", "ElasticCache.__call__"): elastic_cache,
    ("aiha-lab/InfiniPot-V", "process_kv_cache"): infinipot_v,
    ("Zefan-Cai/KVCache-Factory", "PyramidKVCluster.update_kv"): pyramid_lengths,
    ("Zefan-Cai/KVCache-Factory", "AdaKVCluster.update_kv"): adakv,
    ("Zefan-Cai/KVCache-Factory", "L2NormCluster.update_kv"): l2_norm,
    ("AIoT-MLSys-Lab/MEDA", "compute_multimodal_entropy / layer allocation"): meda,
    ("THU-MIG/PrefixKV", "obtain_cdf_num"): prefix_kv,
    ("KD-TAO/DyCoke", "PrunableDynamicCache.dycoke_pruning"): dycoke,
    ("KD-TAO/DyCoke", "dycole_ttm"): dycoke_frames,
    ("dongwonjo/FastKV", "FastKVCluster.update_kv"): fastkv,
    ("optim996/WindowKV", "WindowKVCluster.update_kv"): windowkv,
    ("NVIDIA/kvpress", "CriticalKVPress.score"): critical,
    ("NVIDIA/kvpress", "ExpectedAttentionPress.score"): expected_attention,
    ("NVIDIA/kvpress", "ChunkKVPress.compress"): chunkkv,
    ("NVIDIA/kvpress", "PyramidKVPress.get_layer_budget"): pyramid_kvpress,
    ("NVIDIA/kvpress", "AdaKVPress.compress"): adakv_kvpress,
    ("NVIDIA/kvpress", "ObservedAttentionPress.score"): observed_attention,
    ("NVIDIA/kvpress", "KnormPress.score"): scorer(lambda params: KNorm()),
    ("NVIDIA/kvpress", "KeyDiffPress.score"): scorer(lambda params: KeyDiff()),
    ("NVIDIA/kvpress", "TOVAPress.score"): scorer(lambda params: Tova()),
    ("NVIDIA/kvpress", "LagKVPress.score"): scorer(
        lambda params: LagKV(sinks=params["n_sink"], lag=params["lag_size"])
    ),
}
