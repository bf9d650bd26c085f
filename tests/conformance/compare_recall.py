"""Recall of parked frames against the authors' numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from comparators import Arrays, Params, close, same_set
from compare_clips import film_of
from harness import make

from mmaccel.kv.policies.em_llm import modularity
from mmaccel.method.recall import frame_means


def rekv(params: Params, arrays: Arrays) -> None:
    policy = make("rekv", frames=params["topk"], run=params["chunk_size"])
    keys, query = arrays["in_k"], arrays["in_q"][0]
    blocks, heads, size, width = keys.shape
    flat = keys.transpose(0, 1).reshape(heads, blocks * size, width)
    frames = frame_means(flat, torch.arange(blocks).repeat_interleave(size), blocks)
    alone = make("rekv", frames=params["topk"])
    close(alone.rate(query, frames), arrays["out_scores"])
    same_set(policy.choose(query, frames), arrays["out_blocks"])


def em_llm(params: Params, arrays: Arrays) -> None:
    policy = make("em-llm", shortest=params["min_size"], refine=params["similarity_metric"])
    similar, given = arrays["in_adjacency"], params["boundaries_in"]
    found = policy.moved(given, similar)
    same_set(torch.tensor(found), arrays["out_boundaries"])
    # the notes of the vectors name the cuts whose modularity they show
    close(modularity(similar, [0, *found]), arrays["out_modularity"])


def memory(params: Params, arrays: Arrays) -> None:
    size, keys, values = params["group_size"], arrays["in_k"][0], arrays["in_v"][0]
    groups = keys.shape[1] // size
    policy = make("streamingtom", bits=params["bits"], frames=-(-params["retrieval_max_tokens"] // size))
    frames = frame_means(keys, torch.arange(groups).repeat_interleave(size), groups)
    close(frames.flatten(1), arrays["out_group_keys"])
    same_set(policy.choose(arrays["in_q"][0], frames), arrays["out_selected"])
    for name, x in (("k", keys), ("v", values)):
        packed = [policy.pack(part) for part in x.split(size, dim=1)]
        assert torch.equal(torch.cat([codes for codes, *_ in packed], dim=1), arrays[f"out_{name}_packed"][0])
        close(torch.cat([policy.unpack(part, size) for part in packed], dim=1), arrays[f"out_{name}_dequant"][0])
        if name == "k":
            close(torch.stack([step for _, step, *_ in packed], dim=1), arrays["out_k_scales"][0])
            close(torch.stack([low for _, _, low, _ in packed], dim=1), arrays["out_k_mins"][0])


def reduction(params: Params, arrays: Arrays) -> None:
    options = {"similar": params["similarity_threshold"], "neighbours": params["k"], "blend": params["beta"]}
    frames, places, _ = arrays["in_x"].shape
    clip = film_of(arrays["in_x"])
    clip = replace(clip, signals={"received_attention": arrays["in_attn"].reshape(1, 1, -1)})
    count = torch.tensor([params["retain_tokens"] * frames])
    made = make("streamingtom-ctr", **options).reduce(clip, count)
    assert (made.kept[0].view(frames, places).sum(1) == params["retain_tokens"]).all()
    close(made.substitute(clip.features)[0][made.kept[0]], arrays["out_x"].flatten(0, 1))


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """``x [H, n, D]`` with RoPE in halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * base ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def infllm(params: Params, arrays: Arrays) -> None:
    """The program's loop with our vectors of blocks and our choice. As shipped, keys that are in no block yet and out of the
    window of the last query are visible to all queries of a step, so that some count twice."""
    q, k, v = (arrays[name] for name in ("in_q", "in_k", "in_v"))
    (heads, total, width), base = q.shape, params["rope_base"]
    k, v = (x.repeat_interleave(heads // len(x), dim=0) for x in (k, v))
    local, block, init = params["n_local"], params["block_size"], params["n_init"]
    policy = make("infllm", frames=params["topk"], representatives=params["repr_topk"], local=local)
    far = rotated(q, torch.full((total,), policy.distance), base)
    score, first, sinks = torch.zeros(heads, total), 0, 0
    blocks: list[int] = []
    vectors, outputs, chosen = list[torch.Tensor](), [], []
    for begin in range(0, total, params["exc_block_size"]):
        end = min(begin + params["exc_block_size"], total)
        near = torch.arange(max(0, begin - local), end)
        asking = rotated(q[:, begin:end], torch.arange(begin, end) - near[0], base)
        apart = torch.arange(begin, end)[:, None] - near
        inside = asking @ rotated(k[:, near], near - near[0], base).mT
        inside = inside.masked_fill((apart < 0) | (apart >= local), -torch.inf)
        picked = policy.choose(far[:, begin:end], torch.stack(vectors)).tolist() if vectors else []
        assert all(one < len(blocks) for one in picked)
        chosen.append(picked)
        outside = [place for one in picked for place in range(blocks[one], blocks[one] + block)]
        outside += [*range(sinks), *range(first, max(first, end - local))]
        weights = torch.cat([inside, far[:, begin:end] @ k[:, outside].mT], dim=-1) * width**-0.5
        weights = weights.softmax(-1)
        outputs.append(weights @ torch.cat([v[:, near], v[:, outside]], dim=1))
        score[:, near] += weights[..., : len(near)].sum(1)
        if sinks < init and end - first > local:
            more = min(init - sinks, end - first - local)
            sinks, first = sinks + more, first + more
        while end - first - block >= local:
            part = slice(first, first + block)
            # every query head has its own keys here
            vectors.append(policy.summarise(k[:, part], torch.zeros(block), 1, score[:, part])[0])
            blocks.append(first)
            first += block
    close(torch.stack(vectors), arrays["out_block_repr"])
    for ours, theirs in zip(chosen, arrays["out_selected"], strict=True):
        same_set(torch.tensor(ours), theirs[theirs >= 0])
    close(torch.cat(outputs, dim=1), arrays["out_attn"])


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("Becomebright/ReKV", "ContextManager._calc_block_topk / VectorTensor.get_cosine_similarity"): rekv,
    ("thunlp/InfLLM", "ContextManager.append (one prompt)"): infllm,
    ("em-llm/EM-LLM-model", "events_with_similarity_adjustment / modularity"): em_llm,
    ("YIGE24/StreamingTOM", "CTR.compress_features"): reduction,
    (
        "YIGE24/StreamingTOM",
        "OQM._quantize_tensor / _dequantize_tensor / store_token_keys_as_groups; "
        "StreamingTOMAttentionProcessor._select_top_k_groups",
    ): memory,
}
