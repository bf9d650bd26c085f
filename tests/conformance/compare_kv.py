"""Cache policies, budgets and compactors against the authors' numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from comparators import Arrays, Params, close, kept_of, one_unit, rotate, same_positions, same_rows, same_set
from compare_merging import film_of
from harness import CacheRun, NotOffered, as_queries, fault, in_their_order, make, receiving
from torch import Tensor

from mmaccel.kv.scoring.importance import by_group
from mmaccel.method import LayerAttention, Policy
from mmaccel.runtime.prompt.preview import TextBehind


# --- building inputs, comparing outputs -------------------------------------------------------------------------------
def ratio_count(params: Params, tokens: int) -> int:
    """What kvpress keeps of every head."""
    return max(1, int(tokens * (1 - params["compression_ratio"])))


def last_queries(params: Params, arrays: Arrays) -> Tensor:
    """kvpress makes queries of hidden states; those of the window, after RoPE."""
    keys, window = arrays["in_k"], params.get("window_size", 32)
    hidden = arrays["in_hidden"][:, -window:]
    queries = (hidden @ arrays["in_wq"].T).unflatten(2, (-1, keys.shape[3])).transpose(1, 2)
    return rotate(queries, keys.shape[2] - window)


def same_pairs(run: CacheRun, positions: Tensor, keys: Tensor, values: Tensor, layer: int = 0) -> None:
    """What is stored against ``keys``, ``values [B, H, n, D]`` that stand for ``positions [B, H, n]`` in any order."""
    same_positions(run.positions(layer), positions)
    order = positions.argsort(dim=-1)
    for row, heads in enumerate(run.stored(layer)):
        for head, (ours_k, ours_v) in enumerate(heads):
            close(ours_k, keys[row, head, order[row, head]])
            close(ours_v, values[row, head, order[row, head]])


def kept_mask(run: CacheRun, total: int, layer: int = 0) -> Tensor:
    """``[B, H, total]`` bool: the places that are stored."""
    masks = [
        [torch.zeros(total, dtype=torch.bool).index_fill(0, at, True) for at in row] for row in run.positions(layer)
    ]
    return torch.stack([torch.stack(row) for row in masks])


def figures_of(run: CacheRun, layer: int = 0) -> Tensor:
    """``[B, H, K]``: what the policy carries for the stored keys."""
    received = run.state.layers[layer].schedule.received
    assert received is not None
    return received


# --- accumulated attention --------------------------------------------------------------------------------------------
def h2o(params: Params, arrays: Arrays) -> None:
    """Prefill, then one key and one eviction a step."""
    policy = make("h2o", recent=params["recent_size"], joint=True, every=1)
    run, step = CacheRun(policy, params["hh_size"] + params["recent_size"]), 0
    run.begin(arrays["in_k"].shape[2])
    run.feed(arrays["in_k"], arrays["in_v"], arrays["in_q"])
    while True:
        theirs = arrays[f"out_positions_{step}"]
        same_positions(run.positions(), theirs)
        assert torch.equal(theirs, theirs.sort(-1).values)
        close(figures_of(run)[0], arrays[f"out_score_{step}"])
        if f"out_positions_{step + 1}" not in arrays:
            return
        run.begin(1, prompt=False)
        run.feed(arrays["in_dk"][step], arrays["in_dv"][step], arrays["in_dq"][step])
        step += 1


def a2sf(params: Params, arrays: Arrays) -> None:
    policy, keys = (
        make("a2sf", forget=params["forgetting_factor"], recent=params["recent_budget"], joint=True),
        arrays["in_k"],
    )
    close(policy.forget ** torch.arange(keys.shape[2] - 1, -1, -1), arrays["out_query_weights"])
    run = CacheRun(policy, params["total_budget"])
    score = run.prompt(keys, keys, arrays["in_q"])
    free = score.isfinite()
    close(score[free], arrays["out_scores"][free])
    same_positions(run.positions(), arrays["out_positions"])


def vatp(params: Params, arrays: Arrays) -> None:
    """The prompt, and a step that sees what is left; theirs masks, so that places stay."""
    heavy, recent = params["heavy_budget"], params["recent_budget"]
    keys, values, total = arrays["in_k"], arrays["in_v"], arrays["in_k"].shape[2]
    if not params["h2o"] and total > 400:
        raise NotOffered("scores of the last 400 queries")
    if params["applyval"]:
        policy = make("vatp", recent=recent, sinks=params["sink_len"], joint=True, every=1)
    else:
        policy = make("h2o", recent=recent, joint=True, every=1)
    run = CacheRun(policy, heavy + recent)
    run.begin(total)
    run.feed(keys, values, arrays["in_q"])
    # theirs decides for the next step, whose own key always stays
    assert torch.equal(kept_mask(run, total), arrays["out_keep_next"][None, ..., :total])
    if "out_out_1" not in arrays:
        return
    run.begin(1, prompt=False)
    layer = run.state.layers[0]
    read, held = torch.cat([layer.stored()[0], arrays["in_dk"]], 2), torch.cat([layer.stored()[1], arrays["in_dv"]], 2)
    text = torch.ones(1, 1, dtype=torch.bool)
    weight = LayerAttention(arrays["in_dq"], read, None, keys.shape[3] ** -0.5, text).attention(0, 1)
    close((weight @ held)[0, :, 0].flatten(), arrays["out_out_1"])
    run.feed(arrays["in_dk"], arrays["in_dv"], arrays["in_dq"])
    assert torch.equal(kept_mask(run, total + 1), arrays["out_keep_next_1"][None, ..., : total + 1])


def observed_attention(params: Params, arrays: Arrays) -> None:
    sums = arrays["in_attn_colsum"]
    heads, total = arrays["out_score"].shape[1:]
    keys = arrays["in_k"] if "in_k" in arrays else torch.zeros(1, heads, total, 1)
    policy = receiving("observed-attention", [by_group(sums, heads)], joint=True)
    run = CacheRun(policy, ratio_count(params, total))
    close(run.prompt(keys, keys), arrays["out_score"])
    if "out_kept" in arrays:
        same_positions(run.positions(), arrays["out_kept"])


# --- LOOK-M, D2O, Elastic Cache ---------------------------------------------------------------------------------------
def lookm(how: str, text_first: bool) -> Callable[[Params, Arrays], None]:
    """Text stays, visual keys fill up the heavy hitters; without text, the first four stay."""

    def compare(params: Params, arrays: Arrays) -> None:
        keys, values, total = arrays["in_k"], arrays["in_v"], arrays["in_k"].shape[2]
        heavy, recent = (int(total * params[name]) for name in ("hh_ratio", "recent_ratio"))
        visual = arrays["in_visual_mask"].bool()
        theirs = torch.zeros(1, *keys.shape[1:3], dtype=torch.bool).scatter_(2, arrays["out_positions"], True)
        # theirs pushes visual scores below text by 65516, where float32 has steps of 1/128: close ones tie there
        score = arrays["in_score"][None]
        score = in_their_order(torch.where(visual, score - 65516, score) if text_first else score, theirs)
        options: dict[str, Any] = {"recent": recent, "compact": how}
        if text_first:
            room = max(0, heavy - int((~visual)[: total - recent].sum())) + int(visual[total - recent :].sum())
            # no recipe can ask for no visual key, but for as many keys as there is text, which scores highest
            retain = room or int((~visual).sum())
            policy = receiving("h2o", [score], joint=not room, **options)
            run = CacheRun(policy, retain, visual=visual)
        else:
            options.update(joint=True, sinks=0 if how == "evict" else 4)
            run = CacheRun(receiving("h2o", [score], **options), heavy + recent, visual=visual)
        run.prompt(keys, values)
        same_positions(run.positions(), arrays["out_positions"])
        with fault(how == "average", "average merging pairs keys with the pivots of others"):
            same_pairs(run, arrays["out_positions"], arrays["out_k"], arrays["out_v"])

    return compare


def lookm_port(params: Params, arrays: Arrays) -> None:
    """A port for grouped queries: exactly as many keys as the budget says, text first."""
    keys, values, total = arrays["in_k"], arrays["in_v"], arrays["in_k"].shape[2]
    heavy, recent = (int(total * params["budget"] * share) for share in (0.9, 0.1))
    received = by_group(arrays["in_colsum"], keys.shape[1], "mean") - 10000.0 * arrays["in_visual_mask"]
    run = CacheRun(receiving("h2o", [received], recent=recent, joint=True, compact="pivot"), heavy + recent)
    run.prompt(keys, values)
    same_pairs(run, arrays["out_positions"], arrays["out_k"], arrays["out_v"])


def d2o(params: Params, arrays: Arrays) -> None:
    keys, protected = arrays["in_k"], params["protected_first"]
    heavy, recent = (int(keys.shape[2] * params[name]) for name in ("hh_ratio", "recent_ratio"))
    assert params["alpha"] + params["belta"] == 1
    figures = [arrays["in_score"][None], arrays["in_score_1"][None]]
    options = {"recent": recent, "sinks": protected, "joint": True, "every": 1, "compact": f"ema:{params['alpha']}"}
    run = CacheRun(receiving("h2o", figures, **options), heavy + recent)
    run.begin(keys.shape[2])
    run.feed(keys, arrays["in_v"], torch.zeros_like(keys))
    for step in (0, 1):
        stored, carried = run.state.layers[0].stored(), run.state.layers[0].schedule
        close(stored[0], arrays[f"out_k_{step}"])
        close(stored[1], arrays[f"out_v_{step}"])
        assert carried.threshold is not None
        close(carried.threshold[0, 0], arrays[f"out_threshold_{step}"])
        # theirs writes the protection into the sums
        close(figures_of(run)[0, :, protected:], arrays[f"out_score_{step}"][:, protected:])
        if step == 0:
            run.begin(1, prompt=False)
            run.feed(arrays["in_dk"], arrays["in_dv"], torch.zeros_like(arrays["in_dk"]))


def elastic_cache(params: Params, arrays: Arrays) -> None:
    """Every layer by itself: the prompt, then steps, the last of which drops the slot at the distance."""
    keys, values, new, total = arrays["in_k"], arrays["in_v"], arrays["in_new_k"], params["num_of_token"]
    heads, share = keys.shape[1], 1 - params["ratio"]
    # theirs drops one more than it says, and so none at the first step
    count = total - int(total - total * share) - 1
    assert count == arrays["out_positions"].shape[1]
    slot = int(arrays["out_decode_selected_idx"])
    # a distance from the end tells how many keys there are when the first one goes, after how many steps that is
    steps = slot + 1 - params["distance"] - count if params["distance"] < 0 else 2
    growth = (steps - 0.5) / steps
    options = {
        "joint": True,
        "distance": params["distance"],
        "sinks": params["start_size"],
        "recent": 1,
    }

    def prompt(layer: int) -> CacheRun:
        received = arrays["in_score_sum"][layer].expand(1, heads, -1)
        nothing = torch.zeros(())
        policy = receiving("elastic-cache", [received, *[nothing] * steps], every=steps, growth=growth, **options)
        run = CacheRun(policy, count)
        run.begin(total)
        run.feed(keys[layer, None], values[layer, None], torch.zeros_like(keys[layer, None]))
        return run

    for layer, theirs in enumerate(arrays["out_positions"]):
        run = prompt(layer)
        same_positions(run.positions(), theirs.expand(1, heads, -1))
        for _ in range(steps):
            run.begin(1, prompt=False)
            run.feed(new[layer, None], new[layer, None], torch.zeros_like(new[layer, None]))
        held = torch.cat([theirs, torch.arange(total, total + steps)])
        same_positions(run.positions(), torch.cat([held[:slot], held[slot + 1 :]]).expand(1, heads, -1))
    with fault(
        params["start_size"], "dropped keys are counted from the start of the middle, so that they merge into others"
    ):
        for layer, theirs in enumerate(arrays["out_positions"]):
            positions = theirs.expand(1, heads, -1)
            same_pairs(prompt(layer), positions, arrays["out_k"][layer, None], arrays["out_v"][layer, None])


# --- VL-Cache, PyramidKV, PrefixKV, Ada-KV ----------------------------------------------------------------------------
def vl_cache(params: Params, arrays: Arrays) -> None:
    """What all layers keep; the vector holds how many entries of their attention matter, and what the keys received."""
    sums, ratio, total = arrays["in_importance"], params["alpha"], params["tokens"]
    rows = params["post_vision_queries"]
    entries = sum(total - rows + 1 + i for i in range(rows))
    seen = arrays["in_nonzero"].double().mean(1) / entries
    close(1 - seen, arrays["out_sparsity"])
    if params["different_window_per_layer"]:
        raise NotOffered("a window of its own for every layer")
    heads = arrays["out_positions_l0"].shape[0]
    options = {"per_head": params["head_adaptive"], "joint": True}
    if not params["layer_adaptive"]:
        options["layer_budget"] = "uniform"
    policy = receiving("vl-cache", [by_group(one, heads, "sum") for one in sums], **options)
    run = CacheRun(policy, ratio, layers=len(sums), seen=seen.tolist())
    run.prompt(torch.zeros(1, heads, total, 1), torch.zeros(1, heads, total, 1))
    for layer in range(len(sums)):
        same_positions(run.positions(layer), arrays[f"out_positions_l{layer}"][None])


def pyramid_lengths(params: Params, arrays: Arrays) -> None:
    assert arrays
    for case, theirs in arrays.items():
        found = re.fullmatch(r"out_L(\d+)_cap(\d+)_w(\d+)_q(\d+)_b(\d+)", case)
        assert found is not None
        layers, capacity, window, size, beta = map(int, found.groups())
        policy = make("snapkv", window=window, joint=True, layer_budget=f"pyramid:{beta}")
        run = CacheRun(policy, min(capacity, size), layers=layers)
        assert run.layer_counts(size) == theirs.tolist()


def counts_of(run: CacheRun) -> list[int]:
    """How many keys every layer stores."""
    return [len(run.positions(layer)[0][0]) for layer in range(len(run.state.layers))]


def meda(params: Params, arrays: Arrays) -> None:
    """What all layers keep of 1000 keys, by the entropies of their attention."""
    size, layers = 1000, params["layers"]
    policy = receiving("h2o", [torch.rand(1, 1, size) for _ in range(layers)], layer_budget="entropy", joint=True)
    run = CacheRun(policy, params["rho"], layers=layers, seen=arrays["in_entropy"].double().exp().tolist())
    run.prompt(torch.zeros(1, 1, size, 1), torch.zeros(1, 1, size, 1))
    assert counts_of(run) == [int(share * size) for share in arrays["out_layer_ratio"]]


def squeeze(params: Params, arrays: Arrays) -> None:
    """The cosines of the hidden states are given."""
    cosine, size = arrays["in_cosine"], params["prompt_len"]
    means = cosine.double().mean(1)
    close(means, arrays["out_layer_cosine"])
    share = params["percent"] / params["ini_size"]
    layers = len(cosine)
    figures = [torch.rand(1, 1, size) for _ in range(layers)]
    policy = receiving("h2o", figures, layer_budget=f"squeeze:{share}", joint=True)
    run = CacheRun(policy, params["ini_size"], layers=layers, seen=means.tolist())
    run.prompt(torch.zeros(1, 1, size, 1), torch.zeros(1, 1, size, 1))
    assert counts_of(run) == arrays["out_windows"].tolist()


def prefix_kv(params: Params, arrays: Arrays) -> None:
    scores, cases = arrays["in_score"], [name for name in arrays if name.startswith("out_forget_")]
    layers, size = scores.shape
    assert cases and layers == params["layers"]
    for case in cases:
        figures = list(scores[:, None, None])
        policy = receiving("h2o", figures, layer_budget="prefix", joint=True, sinks=params["protect"] - 1, recent=1)
        run = CacheRun(policy, 1 - int(case.rpartition("_")[2]) / 100, layers=layers)
        run.prompt(torch.zeros(1, 1, size, 1), torch.zeros(1, 1, size, 1))
        assert counts_of(run) == [size - gone for gone in arrays[case].tolist()]


def pyramid_kvpress(params: Params, arrays: Arrays) -> None:
    assert arrays
    size, window = params["tokens"], params["window_size"]
    for case, theirs in arrays.items():
        policy = make("snapkv", window=window, joint=True, layer_budget=f"kvpress:{params['beta']}")
        run = CacheRun(policy, 1 - int(case.rpartition("_")[2]) / 100, layers=params["layers"])
        assert run.layer_counts(size) == theirs.tolist()


_POOLING = {"avgpool": "avg", "maxpool": "max"}


def adakv(params: Params, arrays: Arrays) -> None:
    heads = f"{'concentrated' if params['normalize'] else 'adaptive'}:{params['floor']}"
    policy = make(
        "snapkv",
        window=params["window_size"],
        kernel=params["kernel_size"],
        pooling=_POOLING[params["pooling"]],
        head_budget=heads,
        joint=True,
    )
    run = CacheRun(policy, params["max_capacity_prompt"])
    run.prompt(arrays["in_k"], arrays["in_v"], arrays["in_q_window"])
    ours, ends = run.positions()[0], arrays["out_cu_klen"].tolist()
    assert [len(one) for one in ours] == arrays["out_head_lens"].tolist()
    for head, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        theirs = arrays["out_positions"][first:last]
        same_set(ours[head], theirs)
        order = theirs.argsort()
        keys, values = run.stored()[0][head]
        close(keys, arrays["out_k"][first:last][order])
        close(values, arrays["out_v"][first:last][order])


def adakv_kvpress(params: Params, arrays: Arrays) -> None:
    assert params["inner"] == "SnapKV window 32 kernel 5"
    policy = make("snapkv", window=32, kernel=5, head_budget=f"safeguard:{params['alpha_safeguard']}", joint=True)
    total = arrays["in_k"].shape[2]
    run = CacheRun(policy, int(total * (1 - params["compression_ratio"])))
    run.prompt(arrays["in_k"], arrays["in_v"], last_queries({}, arrays))
    assert torch.equal(kept_mask(run, total)[0], arrays["out_keep_mask"])


# --- keys and values only ---------------------------------------------------------------------------------------------
def infinipot_v(params: Params, arrays: Arrays) -> None:
    keys, values, system, patches = arrays["in_k"], arrays["in_v"], params["system_size"], params["token_per_frame"]
    assert params["inst_size"] == 0 and params["method"] == "infinipot-v"
    layers, heads, total, _ = keys.shape
    policy = make(
        "infinipot-v", tar=params["tar_ratio"], recent_frames=params["query_ratio"], pooled=params["adaptive_pooling"]
    )
    rows = params["height_width"]
    grid = ((total - system) // patches, rows, patches // rows)
    run = CacheRun(
        policy, params["compress_frame_num"] * patches, layers=layers, visual=torch.arange(total) >= system, grid=grid
    )
    run.begin(total)
    for layer in range(layers):
        one = slice(layer, layer + 1)
        run.feed(keys[one], values[one], torch.zeros_like(keys[one]), layer)
        same_positions(run.positions(layer), arrays["out_positions"][one])


def scorer(policy: Callable[[Params], Policy]) -> Callable[[Params, Arrays], None]:
    """A scorer of kvpress, which keeps the best ``max(1, int(tokens (1 - ratio)))`` keys of every head; what must stay has
    its largest score, and is infinite here."""

    def compare(params: Params, arrays: Arrays) -> None:
        ours, total = policy(params), arrays["in_k"].shape[2]
        queries = last_queries({"window_size": ours.window}, arrays) if ours.window else None
        run = CacheRun(ours, ratio_count(params, total))
        score = run.prompt(arrays["in_k"], arrays["in_v"], queries)
        theirs, sure = arrays["out_score"], score == torch.inf
        assert not sure.any() or (theirs[sure] == theirs.max()).all()
        close(score[~sure], theirs[~sure])
        if "out_kept" in arrays:
            same_positions(run.positions(), arrays["out_kept"])

    return compare


def streaming_llm(params: Params, arrays: Arrays) -> None:
    """Theirs only says what stays, ours in which order."""
    total = arrays["in_k"].shape[2]
    run = CacheRun(make("streaming-llm", sinks=params["n_sink"], joint=True), ratio_count(params, total))
    run.prompt(arrays["in_k"], arrays["in_v"])
    assert torch.equal(kept_mask(run, total), arrays["out_score"] == 1)
    same_positions(run.positions(), arrays["out_kept"])


def snapkv(params: Params, arrays: Arrays) -> None:
    queries = arrays["in_q_window"] if "in_q_window" in arrays else arrays["in_q"][:, :, -params["window_size"] :]
    policy = make(
        "snapkv",
        window=params["window_size"],
        kernel=params["kernel_size"],
        pooling=_POOLING[params["pooling"]],
        gqa=params.get("gqa_score_agg", "mean"),
        compact={None: "evict", "weighted": "blend", "pivot": "pivot"}[params.get("merge")],
        joint=True,
    )
    run, values = CacheRun(policy, min(params["max_capacity_prompt"], arrays["in_k"].shape[2])), arrays["in_v"].clone()
    positions = arrays["out_positions"].clone()
    for row, head in [(b, h) for b in range(len(positions)) for h in range(positions.shape[1])]:
        # of kept keys that are copies, all merge into the first in place here, in the order of the scores there
        for there, here in copies(arrays["in_k"][row, head], positions[row, head]):
            values[row, head, here] = arrays["in_v"][row, head, there]
            positions[row, head] = renamed(positions[row, head], there, here)
    run.prompt(arrays["in_k"], values, queries)
    same_pairs(run, positions, arrays["out_k"], arrays["out_v"])


def magicdec(params: Params, arrays: Arrays) -> None:
    """Theirs mixes heads and queries unless the chunks in which it scores are the window; with pooling by maximum it does so
    in any case, where KV heads have several query heads."""
    queries, keys = arrays["in_q"].transpose(0, 1)[None], arrays["in_k"].transpose(0, 1)[None]
    policy = make(
        "magicdec",
        window=params["window_size"],
        kernel=params["kernel_size"],
        pooling=_POOLING[params["pooling"]],
        joint=True,
    )
    run = CacheRun(policy, params["draft_budget"])
    run.prompt(keys, keys, queries)
    same_positions(run.positions(), arrays["out_positions"][None])


def speckv(params: Params, arrays: Arrays) -> None:
    """Of the window the second half was written by the draft: theirs stores its keys, and crops them afterwards."""
    queries, keys, values = (arrays[x] if x in arrays else arrays[f"in_{x}"] for x in "qkv")
    window, capacity = params["window_size"], params["max_capacity_prompt"]
    written, size = window // 2, keys.shape[2]
    policy = make(
        "speckv",
        window=window - written,
        lookahead=written,
        kernel=params["kernel_size"],
        reduce=params["reduction_type"],
        pooling={"mean": "avg", "max": "max"}[params["pool_type"]],
        joint=True,
    )
    prompt, behind = size - written, slice(size - written, size)
    run = CacheRun(policy, capacity - written)
    stage = run.begin(prompt).prompt
    assert stage is not None
    text = stage.scores.behind = TextBehind(run.state.layers, int, torch.arange(prompt, size)[None])
    text.found[0] = queries[:, :, window - written :], keys[:, :, behind], values[:, :, behind]
    asked = torch.nn.functional.pad(queries[:, :, : window - written], (0, 0, prompt - (window - written), 0))
    run.feed(keys[:, :, :prompt], values[:, :, :prompt], asked)
    chosen = (arrays["indices"] if "indices" in arrays else arrays["out_indices"])[..., : capacity - window]
    last = torch.arange(size - window, prompt).expand(*chosen.shape[:2], -1)
    stored = (arrays["k_out"], arrays["v_out"]) if "k_out" in arrays else (arrays["out_k"], arrays["out_v"])
    same_pairs(run, torch.cat([chosen, last], -1), *(x[:, :, : capacity - written] for x in stored))


def copies(keys: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of the kept keys that are equal to the bit, the places as they come in ``positions [n]``, and ascending."""
    _, group = keys[positions].unique(dim=0, return_inverse=True)
    found = [positions[group == one] for one in range(int(group.max()) + 1)]
    return [(there, there.sort().values) for there in found if len(there) > 1]


def renamed(positions: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """``positions [n]`` with every place of ``old`` called as in ``new``."""
    out = positions.clone()
    for a, b in zip(old.tolist(), new.tolist(), strict=True):
        out[positions == a] = b
    return out


def turning(width: int) -> SimpleNamespace:
    """A language model with RoPE of heads of this ``width``, as policies ask for it."""

    def turns(like: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        # a rotation turns the first axes of the two halves into its cosines and sines
        first = int(position[0, 0])
        axes = torch.eye(width)[: width // 2].sum(0).expand(1, 1, position.shape[1], -1)
        cos, sin = rotate(axes, first)[0, 0].split(width // 2, dim=1)
        return cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]

    return SimpleNamespace(rotary_emb=turns, config=SimpleNamespace(rope_parameters=None))


def expected_attention(params: Params, arrays: Arrays) -> None:
    """Queries are made of hidden states; the first keys have the largest score there is."""
    if params["epsilon"]:
        raise NotOffered(f"expected attention with {params['epsilon']} added to the scores")
    policy = make(
        "expected-attention",
        sinks=params["n_sink"],
        future=params["n_future_positions"],
        covariance=params["use_covariance"],
        weigh_values=params["use_vnorm"],
        joint=True,
    )
    keys, (total, width) = arrays["in_k"], arrays["in_k"].shape[2:]

    run = CacheRun(policy, ratio_count(params, total), text=turning(width))
    queries = arrays["in_hidden"] @ arrays["in_wq"].T
    run.begin(total).pre_rope = queries
    run.feed(keys, arrays["in_v"], torch.zeros(1, queries.shape[2] // width, total, width))
    ours, theirs = run.ranks[-1], arrays["out_score"]
    assert (ours[..., : policy.sinks] == torch.inf).all() and (theirs[..., : policy.sinks] == theirs.max()).all()
    close(ours[..., policy.sinks :], theirs[..., policy.sinks :])
    if "out_kept" in arrays:
        same_positions(run.positions(), arrays["out_kept"])


def critical(params: Params, arrays: Arrays) -> None:
    """Around SnapKV; what won the first stage, and the window, has the largest score there is."""
    policy = make("criticalkv", joint=True, first=params["first_stage_ratio"], epsilon=params["epsilon"])
    count = ratio_count(params, arrays["in_k"].shape[2])
    output = SimpleNamespace(self_attn=SimpleNamespace(o_proj=SimpleNamespace(weight=arrays["in_wo"])))
    run = CacheRun(policy, count, text=SimpleNamespace(layers=[output]))
    ours, theirs = run.prompt(arrays["in_k"], arrays["in_v"], last_queries({}, arrays)), arrays["out_score"]
    sure = ours == torch.inf
    assert torch.equal(sure, theirs == theirs.max()) and int(sure[0, 0].sum()) == int(count * policy.first)
    close(ours[~sure], theirs[~sure])
    if "out_kept" in arrays:
        same_positions(run.positions(), arrays["out_kept"])


def dycoke_steps(policy: Policy, steps: Tensor, visual: Tensor, count: int) -> list[Tensor]:
    """The places that every step reads, for attention ``steps [step, H, K]`` of the layer below."""
    total = len(visual)
    run = CacheRun(policy, count, layers=2, visual=visual)
    heads = steps.shape[1]
    run.begin(total)
    some = torch.zeros(1, heads, total, 1)
    run.feed(some, some, some)
    read = []
    for rows in steps:
        run.begin(1, prompt=False)
        stored = run.state.layers[0].seen
        # the keys of the steps themselves are not attended to
        logits = torch.full((1, heads, 1, stored + 1), -torch.inf)
        logits[0, :, 0, :total] = rows.log()
        query, key = as_queries(logits)
        run.feed(some[:, :, :1], some[:, :, :1], query, seen_as=key)
        ((first, chosen),) = run.forward.incoming.reads
        assert chosen is not None and first == 1
        read.append(chosen.places[0].nonzero()[:, 0])
    return read


def dycoke(params: Params, arrays: Arrays) -> None:
    """Which image keys each step reads; theirs reads everything where the attention is alike."""
    first, length = params["image_token_start_index"], params["image_token_length"]
    visual = torch.zeros(params["cache_len"], dtype=torch.bool)
    visual[first : first + length] = True
    policy = make("dycoke-cache", layer=1, alike=params["threshold"])
    read = dycoke_steps(policy, torch.stack(list(arrays["in_attn"])), visual, int(length * (1 - params["dycoke_p"])))
    everything = torch.arange(params["cache_len"])
    for step, ours in enumerate(read):
        theirs = arrays[f"out_keep_{step}"]
        same_set(ours, theirs if len(theirs) else everything)


def dycoke_cache(params: Params, arrays: Arrays) -> None:
    """The paper's rule, which this vector was made by: a set that is alike is read again."""
    first, length = params["image_start"], params["image_len"]
    visual = torch.zeros(params["seq_len"], dtype=torch.bool)
    visual[first : first + length] = True
    policy = make("dycoke-cache", variant="exact", layer=1, alike=params["sim_threshold"])
    count = int(length * (1 - params["prune_ratio_P"]))
    # the program's share is a float too
    assert abs(count - params["num_keep"]) <= 1
    for step, ours in enumerate(dycoke_steps(policy, arrays["attn_steps"], visual, params["num_keep"])):
        same_set(ours, arrays[f"kept_step{step}"])


def dycoke_frames(params: Params, arrays: Arrays) -> None:
    clip = film_of(arrays["in_features"].unflatten(0, (params["frames"], params["num_tokens_per_frame"])))
    for ratio in params["merging_ratios"]:
        theirs = arrays[f"out_ttm_{round(100 * ratio)}"]
        made = make("dycoke-ttm").reduce(clip, torch.tensor([len(theirs)]))
        same_rows(made.apply(clip.features)[0], theirs)


def chunkkv(params: Params, arrays: Arrays) -> None:
    found = re.fullmatch(r"SnapKV window (\d+) kernel (\d+)", params["inner"])
    if found is None:
        raise NotOffered(f"chunks of scores by {params['inner']}")
    policy = make("snapkv", window=int(found[1]), kernel=int(found[2]), neighbours=params["chunk_length"], joint=True)
    run = CacheRun(policy, len(arrays["out_kept"]))
    run.prompt(arrays["in_k"], arrays["in_v"], last_queries({"window_size": policy.window}, arrays))
    same_positions(run.positions(), arrays["out_kept"].expand(*arrays["in_k"].shape[:2], -1))


def windowkv(params: Params, arrays: Arrays) -> None:
    """The first layer of every group chooses for it; theirs drops whole windows until the budget is met."""
    size, suffix, group = params["review_window_size"], params["suffix_size"], params["shared_layers"]
    keys, strategy = arrays["in_k"], params["window_select_strategy"]
    assert strategy == "average" or params["win_max_attn_scores"] == size // 2
    review = keys.shape[2] - suffix
    theirs = arrays["out_layers_budget"].tolist()[::group]
    options = {"window": suffix, "width": size, "strategy": strategy}
    shape = make("windowkv", layer_budget=f"pyramid:{params['beta'] / group}", **options)
    before = CacheRun(
        shape, params["max_capacity_prompt"], layers=len(theirs), visual=torch.arange(keys.shape[2]) < review
    )
    assert before.layer_counts(keys.shape[2]) == theirs
    for layer, budget in zip(range(0, params["num_hidden_layers"], group), theirs, strict=True):
        positions = arrays[f"out_positions_l{layer}"]
        assert len(positions) == review - size * -(-(review - budget) // size) + suffix
        run = CacheRun(make("windowkv", layer_budget="uniform", joint=True, **options), len(positions))
        score = run.prompt(keys, keys, arrays["in_q_suffix"])[0, 0]
        assert (score[positions[:-suffix]].diff() <= 0).all(), "windows come in the order of their scores"
        same_positions(run.positions(), positions.expand(*keys.shape[:2], -1))


def fastkv(params: Params, arrays: Arrays) -> None:
    """What is stored, and which tokens go on to deeper layers."""
    if params["pooling"] != "avgpool":
        raise NotOffered(f"fastkv with {params['pooling']}")
    keys, queries, window = arrays["in_k"], arrays["in_q_window"], params["window_size"]
    total = keys.shape[2]
    shares = params["eviction_mode"] == "proportional"
    capacity = int(total * params["retain_rate"]) if shares else params["max_capacity_prompt"]
    run = CacheRun(make("snapkv", window=window, kernel=params["kernel_size"], gqa="sum", joint=True), capacity)
    run.prompt(keys, keys, queries)
    same_positions(run.positions(), arrays["out_positions"])
    if params["tsp_layer"]:
        method = make("fastkv-tokens", window=window, kernel=params["kernel_size"])
        text = torch.ones(1, window, dtype=torch.bool)
        score = method.observe(LayerAttention(queries, keys, None, keys.shape[3] ** -0.5, text))["window_attention"]
        # theirs counts the window, which always goes on
        older = score[:, : total - window]
        batch = one_unit(older[0, :, None], window_attention=older[0])
        count = int(total * params["tsp_rate"]) if shares else params["tsp_length"]
        ours = kept_of(method.reduce(batch, torch.tensor([count - window])))
        same_set(torch.cat([ours, torch.arange(total - window, total)]), arrays["out_tsp_indices"][0])


def l2_norm(params: Params, arrays: Arrays) -> None:
    assert params["layer_idx"] not in params["skip_layers"]
    run = CacheRun(make("knorm", joint=True), params["max_capacity_prompt"])
    run.prompt(arrays["in_k"], arrays["in_v"])
    same_positions(run.positions(), arrays["out_positions"])


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
    ("hetailang/SqueezeAttention", "LlamaModel.forward (budget part)"): squeeze,
    ("liuzuyan/ElasticCache", "ElasticCache.__call__"): elastic_cache,
    ("aiha-lab/InfiniPot-V", "process_kv_cache"): infinipot_v,
    ("furiosa-ai/draft-based-approx-llm", "draft_approx_llm/speckv/util.py:compress_kv"): speckv,
    ("furiosa-ai/draft-based-approx-llm", "compress_kv"): speckv,
    ("FasterDecoding/SnapKV", "SnapKVCluster.update_kv"): snapkv,
    ("Infini-AI-Lab/MagicDec", "Attention.gen_draft_kv"): magicdec,
    ("Zefan-Cai/KVCache-Factory", "SnapKVCluster.update_kv (kv_head granularity) [+ merge_kv]"): snapkv,
    ("Zefan-Cai/KVCache-Factory", "PyramidKVCluster.update_kv"): pyramid_lengths,
    ("Zefan-Cai/KVCache-Factory", "AdaKVCluster.update_kv"): adakv,
    ("Zefan-Cai/KVCache-Factory", "L2NormCluster.update_kv"): l2_norm,
    ("AIoT-MLSys-Lab/MEDA", "compute_multimodal_entropy / layer allocation"): meda,
    ("THU-MIG/PrefixKV", "obtain_cdf_num"): prefix_kv,
    ("KD-TAO/DyCoke", "PrunableDynamicCache.dycoke_pruning"): dycoke,
    (
        "KD-TAO/DyCoke",
        "llava/model/language_model/modeling_qwen2.py:PrunableDynamicCache.dycoke_pruning/update_cache",
    ): dycoke_cache,
    ("KD-TAO/DyCoke", "dycole_ttm"): dycoke_frames,
    ("dongwonjo/FastKV", "FastKVCluster.update_kv"): fastkv,
    ("optim996/WindowKV", "WindowKVCluster.update_kv"): windowkv,
    ("NVIDIA/kvpress", "CriticalKVPress.score"): critical,
    ("NVIDIA/kvpress", "ExpectedAttentionPress.score"): expected_attention,
    ("NVIDIA/kvpress", "ChunkKVPress.compress"): chunkkv,
    ("NVIDIA/kvpress", "AdaKVPress.compress"): adakv_kvpress,
    ("NVIDIA/kvpress", "ObservedAttentionPress.score"): observed_attention,
    ("NVIDIA/kvpress", "StreamingLLMPress.score"): streaming_llm,
    ("NVIDIA/kvpress", "PyramidKVPress.get_layer_budget"): pyramid_kvpress,
    ("NVIDIA/kvpress", "KnormPress.score"): scorer(lambda params: make("knorm", joint=True)),
    ("NVIDIA/kvpress", "KeyDiffPress.score"): scorer(lambda params: make("keydiff", joint=True)),
    ("NVIDIA/kvpress", "TOVAPress.score"): scorer(lambda params: make("tova", joint=True)),
    ("NVIDIA/kvpress", "LagKVPress.score"): scorer(
        lambda params: make("lagkv", sinks=params["n_sink"], lag=params["lag_size"], joint=True)
    ),
    ("NVIDIA/kvpress", "SnapKVPress.score"): scorer(
        lambda params: make("snapkv", window=params["window_size"], kernel=params["kernel_size"], joint=True)
    ),
}
