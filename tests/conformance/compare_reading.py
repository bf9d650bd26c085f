"""Sparse reads of every decode step against the authors' numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from comparators import Arrays, Params, close, same_set
from harness import CacheRun, as_queries, make
from mmaccel_kernels.quest import page_bounds
from torch import Tensor

from mmaccel.kv.sparse import SparseMemory
from mmaccel.method import Observed, ReadingPolicy
from mmaccel.runtime.call.runs import LayerAttended


def prompted(policy: ReadingPolicy, count: int, keys: Tensor) -> CacheRun:
    """A cache of ``keys [B, Hkv, K, D]``, all of them visual, of which a step reads ``count``; the values are the places."""
    run = CacheRun(policy, count)
    run.begin(keys.shape[2], len(keys))
    places = torch.arange(keys.shape[2], dtype=keys.dtype)[:, None].expand_as(keys)
    run.feed(keys, places, torch.zeros_like(keys))
    return run


def read(run: CacheRun, query: Tensor) -> Tensor:
    """``[B, Hkv, K]`` bool: which keys of the prompt a step with ``query [B, Hq, 1, D]`` reads. Its own key, which the vectors
    count among those of the prompt or leave out, is text and always read."""
    layer = run.state.layers[0]
    total, (batch, heads, _, width) = layer.seen, layer.keys.shape
    step = run.begin(1, batch, prompt=False)
    own = query.new_zeros(batch, heads, 1, width)
    keys, values = layer.update(own, own)
    found = step.keys_to_read(LayerAttended(0, query, keys, values, None, width**-0.5, None))
    assert found is not None and found.chosen is not None, "the step reads everything"
    read = found.chosen.mask(total + 1)[:, :, 0].expand(-1, heads, -1)
    assert read[..., total].all(), "the newest key is not read"
    return read[..., :total]


def by_query_head(keys: Tensor, query: Tensor) -> Tensor:
    """``keys [B, Hkv, K, D]`` as the programs see them, which choose for every head of ``query [B, Hq, 1, D]``."""
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


def attended(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Attention weights ``[B, H, K]`` over what is in the ``mask``."""
    logits = torch.einsum("bhqd,bhkd->bhk", query, keys) * keys.shape[3] ** -0.5
    return logits.masked_fill(~mask, -torch.inf).softmax(-1)


def quest(params: Params, arrays: Arrays) -> None:
    """Theirs ranks for every query head, and the token of the step is in the last page."""
    query, keys = arrays["in_q"], by_query_head(arrays["in_k"], arrays["in_q"])
    policy = make("quest", page=params["chunk_size"], layer=0)
    run = prompted(policy, params["token_budget"], keys)
    ours = read(run, query)
    assert run.state.shared.memory(SparseMemory) is not None
    bounds = run.state.shared.memory(SparseMemory).layers[0].summary["bounds"]
    close(page_bounds(query[:, :, 0], bounds), arrays["out_page_bound"])
    assert torch.equal(ours, arrays["out_token_mask"])
    weight = attended(query, keys, ours)
    close(weight, arrays["out_attn"])
    values = by_query_head(arrays["in_v"], query)
    close(torch.einsum("bhk,bhkd->bhd", weight, values), arrays["out_attn_output"])


def triforce(params: Params, arrays: Arrays) -> None:
    """One query head a KV head; the query of theirs is the last of the prompt, and the choice stays for later steps."""
    keys, query = arrays["in_k"].transpose(0, 1)[None], arrays["in_q"][None, :, None]
    run = prompted(make("triforce", page=params["chunk_size"]), params["max_budget"], keys)
    for number in range(2):
        ours = read(run, query if not number else -query)[..., : keys.shape[2]]
        for head, theirs in enumerate(arrays["out_positions"]):
            same_set(ours[0, head].nonzero()[:, 0], theirs)


def tokenselect(params: Params, arrays: Arrays) -> None:
    """Three steps, all of which choose anew; the query of theirs is the mean of a chunk, and scores are bfloat16."""
    keys = arrays["in_k"].transpose(0, 1)[None]
    policy = make(
        "tokenselect",
        alike=2.0,
        pool=params["kernel_size"],
        sinks=params["n_init"],
        recent=params["n_local"],
        interleaved=True,
    )
    for number in range(3):
        query = arrays[f"in_q{number}"].mean(0).view(1, -1, 1, keys.shape[3])
        run = prompted(policy, params["n_init"] + params["top_k"] + params["n_local"], keys)
        ours = read(run, query)
        assert ours.shape[1] == 1 or (ours == ours[:, :1]).all(), "heads read different keys"
        same_set(ours[0, 0].nonzero()[:, 0], arrays[f"out_indices{number}"])


def loki(params: Params, arrays: Arrays) -> None:
    """In the components that the vector gives; theirs ranks for every query head."""
    query, keys = arrays["in_q"], by_query_head(arrays["in_k"], arrays["in_q"])
    components = by_query_head(arrays["in_components"], query)
    policy = make(
        "loki", {"basis": lambda self, keys, there: components[..., : self.rank(keys.shape[3])]}, dims=params["d_f"]
    )
    run = prompted(policy, params["top_k"], keys)
    ours = read(run, query)
    assert torch.equal(ours, arrays["out_selected"])
    logits = torch.einsum("bhqd,bhkd->bhk", query, keys) * keys.shape[3] ** -0.5
    close(logits[ours], arrays["out_masked_logits"][ours])
    assert run.state.shared.memory(SparseMemory) is not None
    summary = run.state.shared.memory(SparseMemory).layers[0].summary
    low = torch.einsum("bhqd,bhdr,bhkr->bhk", query, summary["basis"], summary["keys"]) * keys.shape[3] ** -0.5
    close((low.softmax(-1) * ours).sum(-1), arrays["out_alpha"])


def squeezed_attention(params: Params, arrays: Arrays) -> None:
    """The threshold of a prompt whose clusters the vector gives; the last tokens, whose queries set it, are text."""
    keys, queries, labels = arrays["in_k"], arrays["in_q"], arrays["in_labels"]
    layers, _, total, width = keys.shape
    window, clustered = params["observation_window"], labels.shape[2]
    assert total - clustered == window
    given, seen = iter(labels), list[Observed]()

    def level(self: ReadingPolicy, layers: Sequence[Observed], share: Tensor) -> Tensor:
        seen[:] = layers
        made: Tensor = super(type(self), self).level(layers, share)
        return made

    policy = make(
        "squeezed-attention",
        {"cluster": lambda self, keys, there: torch.stack([next(given) for _ in keys]), "level": level},
        clusters=params["num_clusters"],
        window=window,
    )
    run = CacheRun(policy, 0.5, layers=layers, visual=torch.arange(total) < clustered)
    run.begin(total)
    for layer in range(layers):
        query = torch.cat([torch.zeros_like(keys[layer, :, window:]), queries[layer]], dim=1)[None]
        run.feed(keys[layer][None], keys[layer][None], query, layer)
    for layer, one in enumerate(list(seen)):
        close(one.summary["centroids"][0], arrays["in_centroids"][layer])
    shares = 1 - torch.tensor([[0.5], [0.7], [0.8], [0.9]], dtype=torch.float64)
    close(torch.cat([policy.level(list(seen), share) for share in shares]), arrays["out_thresholds"])


def clusterkv(params: Params, arrays: Arrays) -> None:
    """With the vector's centroids; all tokens behind the prompt are read."""
    query, total, sinks = arrays["in_q"], params["prompt_len"], params["sink"]
    heads = query.shape[1] // arrays["in_k"].shape[1]
    keys = by_query_head(arrays["in_k"][:, :, :total], query)
    given = arrays["in_centroids"].repeat_interleave(heads, dim=0)[None]
    none = torch.zeros(given.shape[:3], dtype=torch.bool)
    policy = make("clusterkv", {"centroids": lambda self, keys, there: (given, none)}, sinks=sinks, layer=0)
    run = prompted(policy, params["token_budget"], keys)
    ours = read(run, query)
    memory = run.state.shared.memory(SparseMemory)
    assert memory is not None
    labels = memory.layers[0].summary["labels"][0].long()
    assert torch.equal(labels, arrays["out_labels"].repeat_interleave(heads, dim=0))
    theirs = arrays["out_attn"][None] > 0
    assert torch.equal(ours, theirs[..., :total]) and theirs[..., total:].all()
    whole = torch.cat([ours, theirs[..., total:]], -1)
    close(attended(query, by_query_head(arrays["in_k"], query), whole), arrays["out_attn"][None])


def doublesparsity(params: Params, arrays: Arrays) -> None:
    """In the channels that the vector gives; theirs ranks for every query head."""
    query, keys = arrays["in_q"], by_query_head(arrays["in_k"], arrays["in_q"])
    channels = arrays["in_sorted_channel"][None, :, : keys.shape[3] // params["group_factor"]]
    policy = make(
        "doublesparsity",
        {"channels": lambda self, keys: channels},
        group=params["group_factor"],
        bits=params["label_bits"],
    )
    ours = read(prompted(policy, params["heavy_const"], keys), query)
    assert torch.equal(ours, arrays["out_token_mask"])
    close(attended(query, keys, ours), arrays["out_attn"])


def pulse(params: Params, logits: Tensor, visual: Tensor, block: int) -> Tensor:
    """``[n]`` bool: the places that the layers behind the one with ``logits [H, n]`` read; ``visual [n]``."""
    number = int(visual.sum())
    most = params["fixed_budget"] or params["budget_max"]
    options = {"layer": 1, "tau": params["tau"], "least": params["budget_min"], "block": block}
    policy = make("visionpulse", by_mass=params["fixed_budget"] is None, **options)
    # a budget is a whole number here
    count = int(torch.tensor(most) * number) if block == 1 else -int(-most * number // 1)
    run, size = CacheRun(policy, max(1, count), layers=2, visual=visual), len(visual)
    last = size - 1
    assert not visual[last], "the step's own key is text"
    query, key = as_queries(logits[None, :, None])
    some = torch.zeros(1, len(logits), last, 1)
    run.visual = visual[:last]
    run.begin(last)
    run.feed(some, some, some)
    run.begin(1, prompt=False)
    run.feed(some[:, :, :1], some[:, :, :1], query, seen_as=key)
    ((first, chosen),) = run.forward.incoming.reads
    assert chosen is not None and first == 1
    return torch.cat([chosen.places[0], torch.ones(1, dtype=torch.bool)])


def visionpulse(params: Params, arrays: Arrays) -> None:
    """What later layers read; the layer that chooses reads everything here."""
    key = arrays["k"].repeat_interleave(params["groups"], dim=0)
    logits = torch.einsum("hd,hnd->hn", arrays["q"], key) * params["scaling"]
    visual, query, later = arrays["visual"].bool(), arrays["q_later"], arrays["k_later"]
    read = pulse(params, logits, visual, 1)
    same_set((read & visual).nonzero()[:, 0], arrays["keep"])
    assert (read | visual).all()
    later, values = (x.repeat_interleave(params["groups"], dim=0) for x in (later, arrays["v_later"]))
    weight = torch.einsum("hd,hnd->hn", query, later) * params["scaling"]
    weight = weight.masked_fill(~read, -torch.inf).softmax(-1)
    close(torch.einsum("hn,hnd->hd", weight, values), arrays["out_later"])


def visionpulse_blocks(params: Params, arrays: Arrays) -> None:
    block = params["block_size"]
    for row, visual in enumerate(arrays["visual"].bool()):
        read = pulse(params, arrays["logits"][row], visual, block)
        theirs = arrays["kept_blocks"][row]
        theirs = theirs[theirs >= 0]
        places = (theirs[:, None] * block + torch.arange(block)).flatten()
        same_set(read.nonzero()[:, 0], places[places < len(visual)])


def shadowkv(params: Params, arrays: Arrays) -> None:
    """The chunks that a step reads. Outliers and the newest keys are in our budget and beside theirs. Keys before RoPE in a low
    rank are not offered: ours reads the keys as they are."""
    keys, query, chunk = arrays["in_k"], arrays["in_q"], params["chunk_size"]
    start, outliers = int(arrays["out_local_start"]), params["outlier_chunk"]
    newest = keys.shape[2] - start
    assert newest == params["local_chunk"] * chunk + keys.shape[2] % chunk
    policy = make("shadowkv", page=chunk, outliers=outliers, recent=newest)
    run = prompted(policy, newest + outliers * chunk + params["sparse_budget"], keys)
    ours = read(run, query)[0]
    assert run.state.shared.memory(SparseMemory) is not None
    summary = run.state.shared.memory(SparseMemory).layers[0].summary
    assert ours[:, start:].all()
    for head, read_ in enumerate(ours):
        odd = (summary["order"][0, head] < outliers).nonzero()[:, 0]
        assert torch.equal(odd, arrays["out_outlier_chunks"][head])
        others = arrays["out_landmark_idx"][head]
        same_set(torch.cat([odd, others]), torch.arange(start // chunk))
        close(summary["landmarks"][0, head][others], arrays["out_landmarks"][head])
        chosen = read_[:start].clone().view(-1, chunk)
        assert chosen[odd].all()
        chosen[odd] = False
        same_set(chosen.flatten().nonzero()[:, 0], arrays["out_positions"][head])


def infinigen(params: Params, arrays: Arrays) -> None:
    """Of the hidden states of the layer below; theirs ranks for every head, and the weights of the query carry the scale."""
    keys = arrays["in_k"].transpose(0, 1)[None]
    _, heads, total, width = keys.shape
    queries = arrays["in_q"].view(1, total, heads, width).transpose(1, 2)
    guess = torch.nn.functional.linear(arrays["in_hidden"][0], arrays["in_wq"]).view(1, heads, 1, width)
    options = {"share": params["partial_weight_ratio"], "alpha": params["alpha"], "queries": total, "layer": 0}
    policy = make("infinigen", **options)
    run = CacheRun(policy, params["max_num_kv"], layers=2)
    run.begin(total)
    for layer in range(2):
        run.feed(keys, keys, queries, layer)
    step = run.begin(1, prompt=False)
    layer = run.state.layers[1]
    stored, values = layer.update(torch.zeros(1, heads, 1, width), torch.zeros(1, heads, 1, width))
    found = step.keys_to_read(LayerAttended(1, guess, stored, values, None, 1.0, None))
    memory = run.state.shared.memory(SparseMemory)
    assert memory is not None and found is not None and found.chosen is not None
    columns = memory.noted[1][0]
    for ours, theirs in zip(columns, arrays["out_columns"], strict=True):
        same_set(ours, theirs)
    read = found.chosen.mask(total + 1)[0, :, 0].expand(heads, -1)
    for head, theirs in enumerate(arrays["out_prefetch"].T):
        same_set(read[head, :total].nonzero()[:, 0], theirs)


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("mit-han-lab/Quest", "forward (q_len 1) / local_heavy_hitter_mask"): quest,
    ("pzs19/TokenSelect", "TokenRetriever.retrieval_indices / get_topk_tokens"): tokenselect,
    ("SqueezeAILab/SqueezedAttention", "run_global_threshold"): squeezed_attention,
    ("sjtu-zhao-lab/ClusterKV", "build_cluster / cluster_attn_out"): clusterkv,
    ("andy-yang-1/DoubleSparse", "LlamaAttention_heavy_hitter.forward (q_len 1)"): doublesparsity,
    ("xxhhbbbb/VisionPulse", "visionpulse/modeling_qwen3_vl.py:eager_attention_forward"): visionpulse,
    ("xxhhbbbb/VisionPulse", "visionpulse/triton/budget.py:build_sparse_decode_indices_q1"): visionpulse_blocks,
    ("hpcgroup/loki", "mask_attn_pca_topk"): loki,
    ("bytedance/ShadowKV", "ShadowKVCache.get_svd / prefill_kv_cache / get_retrieval_position_ids"): shadowkv,
    ("snu-comparch/InfiniGen", "partial_weight_index_generation / speculate_attention"): infinigen,
    ("Infini-AI-Lab/TriForce", "RetrievalCache.init_graph_cache"): triforce,
}
