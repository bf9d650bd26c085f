"""Methods that a smaller model looks for, beside their authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparators import Arrays, Params, close, kept_of, one_unit, same_set
from harness import make
from torch import Tensor

from mmaccel.method import LayerAttention


def attention(logits: Tensor) -> LayerAttention:
    """Of which :meth:`LayerAttention.logits` are these ``[heads, rows, keys]``."""
    keys = logits.shape[2]
    visible = torch.ones(1, 1, logits.shape[1], keys, dtype=torch.bool)
    return LayerAttention(logits[None], torch.eye(keys)[None, None], visible, 1.0, torch.zeros(1, 1, dtype=torch.bool))


def specprefill(params: Params, arrays: Arrays) -> None:
    scores, options = arrays["scores"], {"run": params["chunk_size"] or 0, "kernel": params["pool_kernel_size"] or 0}
    method, size = make("specprefill", lookahead=params["look_ahead"], **options), scores.shape[3]
    steps = [
        torch.stack([method.see(attention(layer[:, step : step + 1]), size) for layer in scores]).amax(0)
        for step in range(params["look_ahead"])
    ]
    importance = method.finalize(torch.stack(steps, 1), torch.ones(1, len(steps), dtype=torch.bool))[0]
    close(importance, arrays["importance"])
    count = method.official_count(params["percentage"], size)
    made = method.reduce(one_unit(importance[:, None], draft_match=importance), torch.tensor([count]))
    same_set(kept_of(made), arrays["kept"])


def specpc(params: Params, arrays: Arrays) -> None:
    """The vector ranks all tokens, also those of the window, and keeps the window; so here all are visual tokens, of which so
    many are asked for that the window completes the budget."""
    options: dict[str, Any] = {name: params[f"{name}_size"] for name in ("window", "kernel")}
    options |= {"pool": {"avg": "mean"}.get(params["pool_type"], params["pool_type"])}
    options |= {"join": "sum" if params["reduction_type"] == "mean" else "max", "weighted": params["weighted_query"]}
    options |= {"neighbours": -1 if params["neighbor_tokens"] is None else params["neighbor_tokens"]}
    lookahead = params["lookahead_tokens"]
    method = make("specpc", lookahead=lookahead, layer=params["starting_layer_index"], **options)
    prefill = arrays["prefill"]
    size, first = prefill.shape[3], method.begin(len(prefill))
    seen = [prefill, *(arrays[f"step{step}"][:, :, None] for step in range(1, lookahead))]
    # a softmax of logarithms is what they are the logarithms of
    layers = [[method.see(attention(one.clamp(min=1e-38).log()), size) for one in step[first:]] for step in seen]
    join = torch.amax if method.joined == "max" else torch.sum
    steps = torch.stack([join(torch.stack(step), 0) for step in layers], 1)
    there = torch.ones(1, lookahead, dtype=torch.bool)
    close(method.over(steps, there), arrays["aggregated"])
    score = method.finalize(steps, there)
    before = size - params["window_size"]
    most, everyone = params["max_capacity_prompt"], one_unit(score[0, :, None], draft_match=score[0])
    for count in range(most - params["window_size"], most + 1):
        kept = kept_of(method.reduce(everyone, torch.tensor([count])))
        ours = torch.cat([kept[kept < before], torch.arange(before, size)])
        if len(ours) == most:
            break
    same_set(ours, arrays["kept"][0])


def specvlm(params: Params, arrays: Arrays) -> None:
    """The vector's attention is that of the rows behind the video; theirs is a mean over layers."""
    paid, video = arrays["in_attention"], arrays["in_video_mask"].bool()
    by_attention = params["percentage"] is not None
    part = params["percentage"] if by_attention else params["threshold"]
    method = make("specvlm", window=paid.shape[2], part=part, of="attention" if by_attention else "tokens")
    seen = [method.see(attention(layer.clamp(min=1e-38).log()), len(video)) for layer in paid]
    score = method.finalize(torch.stack(seen).sum(0)[:, None], torch.ones(1, 1, dtype=torch.bool))[0, video]
    close(score / len(paid), arrays["out_score"])
    count = method.official_count(1 - params["drop_rate"], len(score))
    made = method.reduce(one_unit(score[:, None], draft_match=score), torch.tensor([count]))
    same_set(kept_of(made), arrays["out_kept"])


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    (
        "Jingyu6/speculative_prefill",
        "speculative_prefill/vllm_patch/worker/look_ahead_spec_worker.py:_token_importance_from_attn_scores, "
        "_get_kept_indices_from_token_importance",
    ): specprefill,
    (
        "furiosa-ai/draft-based-approx-llm",
        "draft_approx_llm/specpc/specpc_utils.py:AttentionCache; specpc.py:specpc_select_input_token_indices",
    ): specpc,
    ("zju-jiyicheng/SpecVLM", "convert_attention_to_score, drop_visual_tokens_specvlm"): specvlm,
}
