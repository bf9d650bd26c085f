"""Cache policies that look at keys before RoPE, at queries to come, or at long answers, against the authors' numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparators import Arrays, Params, close, same_positions
from compare_kv import figures_of, kept_mask, ratio_count, same_pairs, scorer, turning
from harness import CacheRun, NotOffered, make, receiving
from torch import Tensor

from mmaccel.kv.merged_keys import MergedKeys
from mmaccel.kv.policies.razorattention import repetition_scores
from mmaccel.method import LayerAttention, Policy
from mmaccel.method.base import Variant
from mmaccel.method.reread import Reread
from mmaccel.runtime.prompt.preview import TextBehind


def against(run: CacheRun, arrays: Arrays, score: Tensor) -> None:
    """The ``score [B, H, K]`` of ours, infinite where a key stays in any case, against theirs, and the keys that stay."""
    theirs, sure = arrays["out_score"], score == torch.inf
    assert not sure.any() or (theirs[sure] == theirs.max()).all()
    close(score[~sure], theirs[~sure])
    if "out_kept" in arrays:
        same_positions(run.positions(), arrays["out_kept"])


# --- presses of kvpress -----------------------------------------------------------------------------------------------
_LEVERAGE = {"kv_product": "product", "kv_avg": "mean", "key": "key", "value": "value"}


def cur(params: Params) -> Policy:
    if params.get("use_random_leverage"):
        raise NotOffered("a projection by the vector's random numbers")
    policy: Policy = make(
        "cur",
        leverage=_LEVERAGE[params["leverage_type"]],
        local=params["local_window_size"] if params["use_local_approximation"] else 0,
        sinks=params["num_sinks"],
        joint=True,
    )
    return policy


def qfilter(params: Params, arrays: Arrays) -> None:
    """The filters of a model are given, one for every layer."""
    given = arrays["in_filters"][params["layer_idx"]][None]
    policy = make("qfilter", {"filters": lambda self, keys: given}, joint=True)
    run = CacheRun(policy, ratio_count(params, arrays["in_k"].shape[2]))
    against(run, arrays, run.prompt(arrays["in_k"], arrays["in_k"]))


def noncausal(params: Params, arrays: Arrays) -> None:
    policy = make("noncausal-attention", stretch=params["chunk_size"], joint=True)
    run = CacheRun(policy, ratio_count(params, arrays["in_k"].shape[2]))
    against(run, arrays, run.prompt(arrays["in_k"], arrays["in_v"], arrays["in_q"]))


def unrotated(name: str, **named: str) -> Callable[[Params, Arrays], None]:
    """A policy that is shown keys before RoPE, and draws a sketch that the vector gives; ``named`` options and parameters."""

    def compare(params: Params, arrays: Arrays) -> None:
        before, sketch = arrays["in_k_prerope"], arrays["in_sketch"]
        options: dict[str, Any] = {ours: params[theirs] for ours, theirs in named.items()}
        policy = make(name, joint=True, **options)
        if hasattr(policy, "_leverage"):
            given = make("leverage", {"projection": lambda self, keys: sketch}, sketch=sketch.shape[3])
            policy = make(name, {"_leverage": given}, joint=True, **options)
        else:
            policy = make(name, {"projection": lambda self, keys: sketch}, joint=True, **options)
        keys, total = arrays.get("in_k", before), before.shape[2]
        run = CacheRun(policy, total // 2)
        run.begin(total).unrotated = before.transpose(1, 2)
        heads = before.shape[1]
        run.feed(keys, arrays.get("in_v", keys), arrays.get("in_q", keys.new_zeros(1, heads, *keys.shape[2:])))
        against(run, arrays, run.ranks[-1])

    return compare


def cap(params: Params, arrays: Arrays) -> None:
    """Queries before RoPE are given."""
    policy = make("capkv", tau=params["tau"], future=params["n_future_positions"], sinks=params["n_sink"], joint=True)
    keys = arrays["in_k"]
    run = CacheRun(policy, ratio_count(params, keys.shape[2]), text=turning(keys.shape[3]))
    run.begin(keys.shape[2]).pre_rope = arrays["in_q_prerope"].transpose(1, 2)
    run.feed(keys, arrays["in_v"], torch.zeros_like(arrays["in_q_prerope"]))
    against(run, arrays, run.ranks[-1])


def merging(params: Params, arrays: Arrays) -> None:
    """Around KNorm; theirs come in the order of the scores."""
    options = {"compact": f"values:{params['similarity_threshold']}", "merge_share": params["merge_fraction"]}
    keys, values = arrays["in_k"], arrays["in_v"]
    run = CacheRun(make("knorm", joint=True, **options), ratio_count(params, keys.shape[2]))
    score = run.prompt(keys, values)
    order = score.topk(arrays["out_k"].shape[2], dim=-1).indices
    assert torch.equal(keys.gather(2, order[..., None].expand_as(arrays["out_k"])), arrays["out_k"])
    same_pairs(run, order, arrays["out_k"], arrays["out_v"])


# --- a prompt that is read again --------------------------------------------------------------------------------------
def kvzip(params: Params, arrays: Arrays) -> None:
    """One stretch of a prompt, whose tokens that are read again stand behind it in the vector's keys."""
    total, first, last = params["context_length"], params["start_idx"], params["end_idx"]
    query, keys = arrays["in_q"], arrays["in_k"]
    heads, values = keys.shape[1], arrays.get("in_v", keys)
    inside = torch.zeros(total, dtype=torch.bool)
    inside[first:last] = True
    shape = 1, heads, total
    given: dict[str, Any] = {}
    if params["plus"]:
        parts = arrays["in_w_o"].unflatten(1, (query.shape[1], -1)).unbind(1)
        group = query.shape[1] // heads
        lengths = [(values[:, n // group, :total] @ w.T).norm(dim=-1) for n, w in enumerate(parts)]
        given = {"entering": arrays["in_hidden"].norm(dim=-1), "outgoing": torch.stack(lengths, dim=1)}
    policy = make("kvzip", variant="exact", sinks=params["n_sink"], plus=params["plus"], joint=True)
    layer = Reread(
        query=query,
        own=keys[:, :, total:],
        real=torch.ones(query.shape[0], query.shape[2], dtype=torch.bool),
        keys=keys[:, :, :total],
        valid=torch.ones(shape, dtype=torch.bool),
        stretch=inside.expand(shape),
        scaling=keys.shape[3] ** -0.5,
        **given,
    )
    seen = policy.see(layer)
    score = again(policy, total // 2, [seen], keys[:, :, :total]).ranks[-1]
    # the first keys stay, and everything behind the budget is out of the question
    close(seen, arrays["out_score"])
    free = score.isfinite()
    close(score[free], arrays["out_score"][free])
    assert free.any() and not free[..., : params["n_sink"]].any()


def again(policy: Policy, count: float, seen: list[Tensor], keys: Tensor) -> CacheRun:
    """A prompt in as many layers as there are figures ``seen`` while it was read again, ``[1, H, K]`` each."""
    run = CacheRun(policy, count, layers=len(seen))
    run.begin(keys.shape[2]).prompt.scores.reread = dict(enumerate(seen))
    for layer in range(len(seen)):
        run.feed(keys, keys, torch.zeros_like(keys), layer)
    return run


def together(params: Params, arrays: Arrays) -> None:
    """One budget for all layers and heads: the share that is dropped in kvpress, that stays in the authors' program."""
    score = arrays["in_score"]
    layers, heads, total = score.shape
    keys = torch.zeros(1, heads, total, 1)
    shipped = "ratio_kept" in params
    kept = 0 if shipped else score.numel() - int(score.numel() * params["compression_ratio"])
    options = {"sinks": params.get("n_sink", 0), "joint": True}
    if not shipped and params["layerwise"]:
        raise NotOffered("one budget for the heads of each layer")
    # kvpress keeps the last one too
    retain = params["ratio_kept"] if shipped else (kept + 1.5) / score.numel()
    run = again(make("kvzip", **options), retain, list(score[:, None]), keys)
    ours = torch.stack([kept_mask(run, total, layer)[0] for layer in range(layers)])
    theirs = arrays["out_kept"] == 1 if shipped else arrays["out_dropped"] == 0
    assert torch.equal(ours, theirs)


# --- what the model makes of a prompt when it is over -----------------------------------------------------------------
def laq(params: Params, arrays: Arrays) -> None:
    """The queries of the pseudo answer are given; their keys, which no query sees, are not."""
    queries, keys, values = (arrays[f"in_{x}"] for x in "qkv")
    window, written = params["window_size"], params["lookahead_size"]
    size, heads = keys.shape[2], queries.shape[1]
    policy = make(
        "laq",
        window=window,
        lookahead=written,
        kernel=params["kernel_size"],
        pooling={"avgpool": "avg", "maxpool": "max"}[params["pooling"]],
        joint=True,
    )
    run = CacheRun(policy, params["max_capacity_prompt"])
    stage = run.begin(size).prompt
    text = stage.scores.behind = TextBehind(run.state.layers, int, torch.arange(size, size + written)[None])
    none = keys.new_zeros(1, keys.shape[1], written, keys.shape[3])
    text.found[0] = queries[:, :, window:], none, none
    asked = keys.new_zeros(1, heads, size, keys.shape[3])
    asked[:, :, size - window :] = queries[:, :, :window]
    run.feed(keys, values, asked)
    same_pairs(run, arrays["out_positions"][None], arrays["out_k"], arrays["out_v"])


def sirllm(params: Params, arrays: Arrays) -> None:
    """Entropies are given; theirs makes room for tokens to come."""
    entropy, coming = arrays["in_entropy"].float(), params["num_coming"]
    budget = sum(params[f"{name}_size"] for name in ("start", "recent", "token_entropy")) - coming
    most = max(0, params["token_entropy_size"] - coming)
    policy = make("sirllm", surprising=most, sinks=params["start_size"])
    run = CacheRun(policy, budget)
    run.begin(len(entropy)).prompt.scores.reread = {0: entropy[None, None]}
    none = torch.zeros(1, 1, len(entropy), 4)
    run.feed(none, none, none)
    same_positions(run.positions(), arrays["out_kept"][None, None])
    close(entropy[run.positions()[0][0]], arrays["out_entropy"].float())


# --- heads that are told apart ----------------------------------------------------------------------------------------
def razor(params: Params, arrays: Arrays) -> None:
    """Queries and keys of every layer are given; as in the program the begin token counts as one of the first period."""
    query, key = arrays["in_q"], arrays["in_k"]
    layers, heads = key.shape[:2]
    text = torch.ones(1, key.shape[2], dtype=torch.bool)
    each = []
    for q, k in zip(query, key, strict=True):
        layer = LayerAttention(q[None], k[None], None, k.shape[2] ** -0.5, text)
        each.append(repetition_scores(layer, params["period"]))
    found = [torch.stack(x) for x in zip(*each, strict=True)]
    given = {"echo": found[0], "induction": found[1]}
    for name, scores in given.items():
        close(scores, arrays[f"out_{name}"].double())
    figures = {name: dict(enumerate(x.unflatten(1, (heads, -1)).amax(2))) for name, x in given.items()}
    shares = {name: params[f"{name}_head_ratio"] for name in figures}

    def full(variant: Variant, **options: float) -> Tensor:
        policy = make("razorattention", {"figures": lambda self, name: figures[name]}, variant, **options)
        by_layer = policy.full_heads()
        return torch.stack([by_layer[n] for n in range(layers)])

    assert torch.equal(full("exact", **shares), arrays["out_union"].bool())
    assert torch.equal(full("official", **shares), arrays["out_merged_as_shipped"].bool())
    for name in figures:
        alone = {**dict.fromkeys(shares, 0.0), name: shares[name]}
        assert torch.equal(full("exact", **alone), arrays[f"out_{name}_heads"].bool())


def duo(params: Params, arrays: Arrays) -> None:
    """Gates are given; what a cache stores follows from them."""
    if params["sparsity"] is None:
        raise NotOffered("a threshold in place of a sparsity")
    gates, size = arrays["in_gates"], 40
    figures = dict(enumerate(gates))
    given = {
        "figures": lambda self, name: figures,
        "kept_by": lambda self, layer, device: torch.zeros(gates.shape[1]).masked_fill(
            ~self.full_heads()[layer], -torch.inf
        ),
    }
    policy = make("duoattention", given, sparsity=params["sparsity"], sinks=2, recent=3)
    full = torch.stack([policy.full_heads()[n] for n in range(len(gates))])
    assert torch.equal(full, arrays["out_full"].bool())
    close(1 - full.double().mean(), arrays["out_sparsity"].double())
    run = CacheRun(policy, 1.0, layers=len(gates))
    run.prompt(torch.zeros(1, gates.shape[1], size, 4), torch.zeros(1, gates.shape[1], size, 4))
    for layer, heads in enumerate(full):
        assert [len(one) for one in run.positions(layer)[0]] == [size if one else 5 for one in heads]


# --- while decoding ---------------------------------------------------------------------------------------------------
def keyformer(params: Params, arrays: Arrays) -> None:
    """The prompt, then one token and one eviction a step; theirs count the slot of the token to come among the newest."""
    recent, heavy = params["req_tokens"]
    queries, keys, values = (arrays[f"in_{x}"] for x in "qkv")
    steps = params["steps"]
    size = keys.shape[2] - steps
    policy = make(
        "keyformer", tau=params["tau_init"], slope=params["tau_delta"], recent=recent - 1, joint=True, every=1
    )
    run = CacheRun(policy, recent + heavy - 1)
    run.begin(size)
    run.feed(*(x[:, :, :size] for x in (keys, values, queries)))
    for step in range(steps + 1):
        seen = size + step
        theirs = arrays["out_masks"][step][:, :seen].bool()
        assert torch.equal(kept_mask(run, seen)[0], theirs), step
        if step == steps:
            break
        run.begin(1, prompt=False)
        new = slice(seen, seen + 1)
        held, layer = kept_mask(run, seen)[0], run.state.layers[0]
        read = [torch.cat([x, y[:, :, new]], 2) for x, y in zip(layer.stored(), (keys, values), strict=True)]
        text = torch.ones(1, 1, dtype=torch.bool)
        weight = LayerAttention(queries[:, :, new], read[0], None, keys.shape[3] ** -0.5, text).attention(0, 1)
        close((weight @ read[1])[0, :, 0], arrays["out_attn_output"][step + 1, 0])
        assert held.any()
        run.feed(keys[:, :, new], values[:, :, new], queries[:, :, new])
    live = arrays["out_masks"][-1][:, : keys.shape[2]].bool()
    theirs = torch.stack([row[mask] for row, mask in zip(arrays["out_scores"], live, strict=True)])
    close(figures_of(run)[0], theirs)


def zeromerge(params: Params, arrays: Arrays) -> None:
    """A prompt, and one token and one merge a step. Theirs stores merged keys in front, then the best and the newest."""
    if params["metric"] != "dot_product":
        raise NotOffered(f"merging by {params['metric']}")
    keys, values, queries, merged = arrays["in_k"], arrays["in_v"], arrays["in_q"], params["cache_dense"]
    policy = make(
        "zeromerge",
        forget=params["shrink_factor"],
        tail=params["cache_tail"],
        compact=f"residual:{merged}",
        merge_weight=params["scale_factor"],
        joint=True,
        every=1,
    )
    run, scaling = CacheRun(policy, params["cache_budget"]), keys.shape[3] ** -0.5
    run.begin(keys.shape[2])
    run.feed(keys, values, queries)
    score = run.ranks[-1]
    close(score[score.isfinite()], arrays["out_scores"][score.isfinite()])
    layer, memory = run.state.layers[0], run.state.shared.memory(MergedKeys)
    assert memory is not None

    def same(of_step: str) -> None:
        """What is stored, every slot of ours against the one of theirs that holds the same key."""
        counts = memory.of_slots(0, layer.index.by_head)
        ours = [*layer.stored(), counts.clamp(min=1)[..., None]]
        theirs = [arrays[f"out_{name}{of_step}"] for name in "kv" if f"out_{name}{of_step}" in arrays]
        theirs += [arrays[f"out_weight{of_step}"][..., None]]
        ours = ours if len(theirs) == 3 else [ours[0], ours[2]]
        for head in range(keys.shape[1]):
            far = (ours[0][0, head][:, None] - theirs[0][0, head]).abs().amax(-1)
            left = torch.zeros(len(far))
            pairs = torch.empty(len(far), dtype=torch.long)
            for slot, row in enumerate(far):
                # some keys are copies
                pairs[slot] = (row + left).argmin()
                left[pairs[slot]] = torch.inf
            # in the order of their runs
            assert pairs[counts[0, head] > 0].tolist() == list(range(merged))
            for mine, its in zip(ours, theirs, strict=True):
                close(mine[0, head], its[0, head, pairs])

    same("")
    step = 0
    while f"out_attn_out_{step + 1}" in arrays:
        new = [arrays[f"in_d{name}"][step] for name in "kvq"]
        read = [torch.cat([x, y], 2) for x, y in zip(layer.stored(), new[:2], strict=True)]
        counts = torch.nn.functional.pad(memory.of_slots(0, layer.index.by_head), (0, 1))
        query, wide = memory.widened(new[2], read[0], counts, scaling)
        text = torch.ones(1, 1, dtype=torch.bool)
        weight = LayerAttention(query, wide, None, scaling, text).attention(0, 1)
        shown = read[1].repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
        close(weight @ shown, arrays[f"out_attn_out_{step + 1}"])
        step += 1
        run.begin(1, prompt=False)
        run.feed(*new)
        same(f"_{step}")


def morphkv(params: Params, arrays: Arrays) -> None:
    """Theirs says ``max_capacity``, and keeps the current token besides."""
    window = params["window_size"]
    policy = make("morphkv", window=window + 1, fusion=params["morph_type"].removesuffix("_fused"), joint=True)
    run = CacheRun(policy, params["max_capacity"] + 1)
    run.prompt(arrays["in_k"], arrays["in_v"], arrays["in_q"])
    same_pairs(run, arrays["out_positions"][None], arrays["out_k"], arrays["out_v"])


def rpc(params: Params, arrays: Arrays) -> None:
    """A prompt, and all of the answer up to the compression in one forward."""
    if params["agg_func"] != "mean":
        raise NotOffered(f"heads joined by {params['agg_func']}")
    keys, values, prompt, newest = arrays["in_k"], arrays["in_v"], params["prompt_len"], params["R"]
    written = keys.shape[2] - prompt
    kept = (params["num_comp"] + 1) * params["T"]
    policy = make(
        "rpc",
        every=written,
        growth=(kept + 0.5) / written,
        window=newest,
        kernel=params["kernel_size"],
        pooling={"avgpool": "avg", "maxpool": "max"}[params["pooling"]],
        aggregation=params["aggregation"],
    )
    run = CacheRun(policy, 1.0)
    heads = arrays["in_q"].shape[1]
    run.begin(prompt)
    run.feed(keys[:, :, :prompt], values[:, :, :prompt], keys.new_zeros(1, heads, prompt, keys.shape[3]))
    run.begin(written, prompt=False)
    asked = torch.nn.functional.pad(arrays["in_q"], (0, 0, written - newest, 0))
    run.feed(keys[:, :, prompt:], values[:, :, prompt:], asked)
    same_pairs(run, arrays["out_positions"][None], arrays["out_k"], arrays["out_v"])


def quickprefill(params: Params, arrays: Arrays) -> None:
    """One mask for all heads, for each mode of the program."""
    keys, values = (x if x.dim() == 4 else x[None] for x in (arrays["in_k"], arrays["in_v"]))
    size, heads = keys.shape[2], keys.shape[1]
    asked = arrays.get("in_query_scores", arrays.get("in_query_attention"))
    for name in (name for name in arrays if name.startswith("out_")):
        mode = name.removeprefix("out_")
        seen = (
            asked if mode.startswith("query") else arrays["in_attention"].tril().sum(0) if "attention" in mode else None
        )
        if seen is None:
            policy = make("quickprefill", mode=mode, joint=True)
        else:
            figures = seen.float().reshape(1, 1, size).expand(1, heads, -1)
            policy = receiving("quickprefill", [figures], mode=mode, joint=True)
        run = CacheRun(policy, params["top_k"])
        run.prompt(keys, values)
        same_positions(run.positions(), arrays[name].reshape(-1).nonzero()[:, 0].expand(1, heads, -1))


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("SusCom-Lab/ZeroMerge", "cache_init / cache_update / score_scaled_dot_product_attention"): zeromerge,
    ("NVIDIA/kvpress", "CURPress.score"): scorer(cur),
    ("NVIDIA/kvpress", "QFilterPress.score"): qfilter,
    ("NVIDIA/kvpress", "NonCausalAttnPress.score"): noncausal,
    ("NVIDIA/kvpress (PyPI kvpress)", "LeverageScorePress.score"): unrotated("leverage", sketch="sketch_dimension"),
    ("NVIDIA/kvpress (PyPI kvpress)", "CompactorPress.score"): unrotated(
        "compactor",
        stretch="chunk_size",
        blend="blending",
        sinks="sink_size_start",
        recent="sink_size_end",
        sketch="sketch_dimension",
    ),
    ("NVIDIA/kvpress (PyPI kvpress)", "CapPress.score"): cap,
    ("NVIDIA/kvpress", "MergingPress.compress"): merging,
    ("NVIDIA/kvpress (PyPI kvpress)", "KVzipPress.score_kvzip"): kvzip,
    ("NVIDIA/kvpress (PyPI kvpress)", "KVzipPress.compress_post"): together,
    ("snu-mllab/KVzip", "KVScore._threshold, ._threshold_uniform"): together,
    ("noforit/Lookahead_Q-Cache", "SnapKVCluster.update_kv_LAQ"): laq,
    ("Zoeyyao27/SirLLM", "StartRecentKVCache.evict_for_space_token_entropy"): sirllm,
    ("mindspore-lab/golden-stick", "RazorAttention._calc_score / _select_top_heads / _get_retrieval_heads"): razor,
    ("mit-han-lab/duo-attention", "sparsify_attention_heads"): duo,
    ("d-matrix-ai/keyformer-llm", "GPTJAttention._attn"): keyformer,
    ("ghadiaravi13/MorphKV", "LlamaAttentionMorph.morphkv_mask / DynamicCache.cleanup"): morphkv,
    ("jiwonsong-dev/ReasoningPathCompression", "RPCCluster.compress_kv"): rpc,
    ("TIGER-AI-Lab/QuickVideo", "get_top_k_mask_to_predict"): quickprefill,
}
