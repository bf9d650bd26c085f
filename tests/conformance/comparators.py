"""Which of our public functions answers for which function of an authors' program.

A comparator takes a vector's parameters and arrays, runs ours on the inputs and asserts equality with the outputs. It
returns only after it has compared; what cannot be compared raises :class:`NotBuilt` or :class:`Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.kv.compact import merge
from mmaccel.kv.policies.snapkv import SnapKV
from mmaccel.kv.policies.streaming_llm import StreamingLLM
from mmaccel.layers.fastv import FastV
from mmaccel.merging.tome import bipartite_soft_matching, kth_bipartite_matching, layer_removals
from mmaccel.method import KeyBatch, Policy, TokenBatch
from mmaccel.pruning.divprune import DivPrune
from mmaccel.pruning.vtc_cls import VtcCls
from mmaccel.reduction import Reduction, top_mask

Params = Mapping[str, Any]
Arrays = Mapping[str, Tensor]


class NotBuilt(Exception):
    """The vector shows an option that we do not have yet."""


class Fault(Exception):
    """The vector shows a fault of the authors' program that ours deliberately does not have."""


# --- building inputs, comparing outputs -------------------------------------------------------------------------------
def one_unit(features: Tensor, **signals: Tensor) -> TokenBatch:
    """A batch of one unit without padding or grid, features ``[n, D]``; signals get the batch axis in front."""
    n = len(features)
    return TokenBatch(
        features=features[None],
        valid=torch.ones(1, n, dtype=torch.bool),
        cells=torch.full((1, n, 3), -1),
        grid=torch.tensor([[1, 1, n]]),
        segment=torch.zeros(1, n, dtype=torch.long),
        signals={name: value[None] for name, value in signals.items()},
    )


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal within 1e-4, relative; entries that cancelled to almost nothing are measured against the largest."""
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


def same_set(ours: Tensor, theirs: Tensor) -> None:
    """Positions as sets; neither side may repeat one."""
    assert ours.unique().numel() == ours.numel() and theirs.unique().numel() == theirs.numel()
    assert torch.equal(ours.sort().values, theirs.long().sort().values)


def same_rows(ours: Tensor, theirs: Tensor) -> None:
    """Rows of features in any order: nearest rows must pair off one to one, and be close."""
    assert ours.shape == theirs.shape
    pair = torch.cdist(theirs.double(), ours.double()).argmin(1)
    assert pair.unique().numel() == len(pair), "two rows of theirs are nearest to the same row of ours"
    close(ours[pair], theirs)


# --- visual tokens ----------------------------------------------------------------------------------------------------
def divprune(params: Params, arrays: Arrays) -> None:
    features, order = arrays["features"], arrays["selected_order"]
    # the program rounds half to even
    count = round(params["threshold_ratio"] * len(features))
    assert count == len(order)
    kept = DivPrune().reduce(one_unit(features), torch.tensor([count])).kept[0].nonzero()[:, 0]
    assert len(kept) == count
    if order.unique().numel() < len(order):
        raise Fault("DivPrune picks a token again when only copies are left")
    same_set(kept, order)
    same_set(kept, arrays["kept_sorted"])


def vtc_cls(params: Params, arrays: Arrays) -> None:
    first = params["first_saved_layer"]
    layers = range(params["start_layer"], params["num_layers"] - 1)
    saved = arrays["cls_attn_layers"][layers.start - first : layers.stop - first]
    assert len(saved) == len(layers)
    batch = one_unit(arrays["features"], cls_attention=saved.mean(1))
    ours = VtcCls(layers=tuple(layers)).reduce(batch, torch.tensor([params["token_num"]]))
    same_set(ours.kept[0].nonzero()[:, 0], arrays["kept_idx"])
    close(ours.apply(batch.features)[0], arrays["kept_features"])


def fastv(params: Params, arrays: Arrays) -> None:
    start, length = params["image_start"], params["image_len"]
    attention = arrays["attn_last_row"].mean(0)
    image = attention[start : start + length]
    # the program rounds half to even
    count = torch.tensor([round(length * (1 - params["r"]))])
    ours = FastV().reduce(one_unit(image[:, None], prompt_attention=image), count).kept[0].nonzero()[:, 0]
    text = torch.cat([torch.arange(start), torch.arange(start + length, len(attention))])
    same_set(torch.cat([text, ours + start]), arrays["keep_idx"])


def tome(params: Params, arrays: Arrays) -> None:
    metric, x = arrays["metric"], arrays["x"]
    protected = int(params["class_token"]) + int(params.get("distill_token", False))
    valid = torch.ones(metric.shape[:2], dtype=torch.bool)

    target = bipartite_soft_matching(metric, params["r"], protected)
    assert int((target != torch.arange(target.shape[1])).sum(1).max()) == params["r_effective"]
    ours, source = Reduction.merge(target, valid), arrays["source"]
    for row in range(len(x)):
        # the tokens of one output of theirs all flow into one slot of ours, and no others do
        slots = source[row].long().argmax(1)
        into = target[row][slots]
        assert torch.equal(source[row], target[row][None] == into[:, None])
        close(ours.substitute(x)[row, into], arrays["out"][row])
        close(ours.mass()[row, into], arrays["size"][row, :, 0])

    if "metric2" in arrays:
        size = arrays["size"][..., 0]
        target = bipartite_soft_matching(arrays["metric2"], params["r2"], protected)
        ours = Reduction.merge(target, torch.ones_like(size, dtype=torch.bool), size)
        merged, mass = ours.apply(arrays["out"]), ours.mass(size)
        for row in range(len(x)):
            weighed = torch.cat([merged[row], mass[row][ours.kept[row]][:, None]], 1)
            same_rows(weighed, torch.cat([arrays["out2"][row], arrays["size2"][row]], 1))


def tome_kth(params: Params, arrays: Arrays) -> None:
    target = kth_bipartite_matching(arrays["metric"], params["k"])
    ours = Reduction.merge(target, torch.ones_like(target, dtype=torch.bool)).apply(arrays["x"])
    close(ours, arrays["out"])


def tome_schedule(params: Params, arrays: Arrays) -> None:
    assert params
    for case, given in params.items():
        r = given["r"]
        # JSON has no tuples: (r, inflect) is a pair that ends in a float, anything else a list of numbers
        pair = isinstance(r, list) and len(r) == 2 and isinstance(r[1], float)
        ours = layer_removals(given["num_layers"], *(r if pair else [r]))
        assert ours == arrays[case].tolist()


# --- the cache --------------------------------------------------------------------------------------------------------
def key_batch(arrays: Arrays, queries: Tensor) -> KeyBatch:
    keys = arrays["in_k"]
    shape = (len(keys), keys.shape[2])
    return KeyBatch(
        keys=keys,
        values=arrays["in_v"],
        queries=queries,
        valid=torch.ones(shape, dtype=torch.bool),
        visual=arrays["in_visual_mask"].expand(shape),
        index=torch.arange(shape[1]).expand(shape),
        scaling=keys.shape[3] ** -0.5,
    )


def same_keys(score: Tensor, count: int, theirs: Tensor) -> Tensor:
    """The ``count`` best keys of every head against the positions ``[B, Hkv, count]`` they kept; the mask of ours."""
    flat = score.flatten(0, 1)
    kept = top_mask(flat, torch.ones_like(flat, dtype=torch.bool), torch.full((len(flat),), count))
    for ours, positions in zip(kept, theirs.flatten(0, 1), strict=True):
        same_set(ours.nonzero()[:, 0], positions)
    return kept.reshape(score.shape)


def rotate(queries: Tensor, first: int, theta: float = 10000.0) -> Tensor:
    """RoPE in the layout of two halves for ``[B, H, T, D]``, the first of which stands at position ``first``."""
    half = queries.shape[-1] // 2
    inverse = theta ** -(torch.arange(half) / half)
    angle = (torch.arange(queries.shape[2]) + first)[:, None] * inverse
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    swapped = torch.cat([-queries[..., half:], queries[..., :half]], -1)
    return queries * cos + swapped * sin


def kvpress(policy: Callable[[Params], Policy]) -> Callable[[Params, Arrays], None]:
    """A scorer of kvpress, which keeps the best ``max(1, int(tokens (1 - ratio)))`` keys of every head."""

    def compare(params: Params, arrays: Arrays) -> None:
        ours, (batch, _, tokens, width) = policy(params), arrays["in_k"].shape
        queries = torch.zeros(batch, arrays["in_k"].shape[1], 0, width)
        if ours.window:
            hidden = arrays["in_hidden"][:, -ours.window :]
            queries = (hidden @ arrays["in_wq"].T).unflatten(2, (-1, width)).transpose(1, 2)
            queries = rotate(queries, tokens - ours.window)
        score = ours.score(key_batch(arrays, queries))
        kept = same_keys(score, max(1, int(tokens * (1 - params["compression_ratio"]))), arrays["out_kept"])
        if ours.window:
            # what must stay is infinite with us, and the largest score with them
            close(score[..., : -ours.window], arrays["out_score"][..., : -ours.window])
        else:
            # theirs only says what stays, ours in which order
            assert torch.equal(kept, arrays["out_score"] == 1)

    return compare


def snapkv(params: Params, arrays: Arrays) -> None:
    queries = arrays["in_q_window"] if "in_q_window" in arrays else arrays["in_q"][:, :, -params["window_size"] :]
    options: dict[str, Any] = {"pooling": {"avgpool": "avg", "maxpool": "max"}[params["pooling"]]}
    options["gqa"] = params.get("gqa_score_agg", "mean")
    policy = SnapKV(window=params["window_size"], kernel=params["kernel_size"], **options)
    score = policy.score(key_batch(arrays, queries))
    kept = same_keys(score, min(params["max_capacity_prompt"], score.shape[2]), arrays["out_positions"])
    # theirs come in the order of their scores, which also decides between keys that are alike
    positions = arrays["out_positions"]
    order = torch.cat([positions, kept.long().argsort(dim=-1, stable=True)[..., : -positions.shape[2]]], dim=2)
    keys, values = (arrays[f"in_{name}"].gather(2, order[..., None].expand_as(arrays["in_k"])) for name in ("k", "v"))
    if params.get("merge") is not None:
        first = (torch.arange(order.shape[2]) < positions.shape[2]).expand(order.shape)
        made = merge({"weighted": "blend", "pivot": "pivot"}[params["merge"]], keys, values, first, ~first)
        keys, values = made.keys, made.values
    close(keys[:, :, : positions.shape[2]], arrays["out_k"])
    close(values[:, :, : positions.shape[2]], arrays["out_v"])


_FASTV = "src/FastV/llava-hf/transformers/src/transformers/models/llama/modeling_llama.py"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("vbdi/divprune", "LLaVA/llava/model/llava_arch.py:LlavaMetaForCausalLM.DivPrune"): divprune,
    (
        "THU-MIG/VTC-CLS",
        "llava/model/multimodal_encoder/clip_encoder.py:cls_token_only + llava/model/llava_arch.py:encode_images",
    ): vtc_cls,
    ("pkunlp-icler/FastV", f"{_FASTV}:LlamaModel.fastv_forward (block at layer K)"): fastv,
    ("facebookresearch/ToMe", "tome/merge.py:bipartite_soft_matching + merge_wavg + merge_source"): tome,
    ("facebookresearch/ToMe", "tome/merge.py:kth_bipartite_soft_matching"): tome_kth,
    ("facebookresearch/ToMe", "tome/utils.py:parse_r"): tome_schedule,
    ("FasterDecoding/SnapKV", "SnapKVCluster.update_kv"): snapkv,
    ("Zefan-Cai/KVCache-Factory", "SnapKVCluster.update_kv (kv_head granularity) [+ merge_kv]"): snapkv,
    ("NVIDIA/kvpress", "SnapKVPress.score"): kvpress(
        lambda params: SnapKV(window=params["window_size"], kernel=params["kernel_size"])
    ),
    ("NVIDIA/kvpress", "StreamingLLMPress.score"): kvpress(lambda params: StreamingLLM(sinks=params["n_sink"])),
}
