"""Selectors of 2025 and 2026 before the language model, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from comparators import Arrays, Params, close, kept_of, one_unit, same_set
from harness import fault, make, run
from torch import Tensor

from mmaccel.core.layout import Layout, Segment, Tile
from mmaccel.core.reduction import Links, Reduction
from mmaccel.kv.forward_info import ForwardInfo
from mmaccel.kv.index import KeyIndex
from mmaccel.method import Method, TokenBatch
from mmaccel.runtime.call.runs import TextInputs
from mmaccel.runtime.prompt.proportional import WeighTokens


def in_order(method: Method, tokens: TokenBatch, order: Tensor) -> None:
    """A greedy method that is given one token more keeps the next of ``order``."""
    for count in range(1, len(order) + 1):
        ours = method.reduce(tokens, torch.tensor([count]))  # type: ignore[attr-defined]
        same_set(kept_of(ours), order[:count])


def of_tower(features: Tensor, attention: Tensor) -> TokenBatch:
    """One tile of ``features [n, d]`` in the tower, ``attention [n]`` of CLS."""
    return replace(
        one_unit(features), signals={"cls_attention": attention[None, None], "features": features[None, None]}
    )


def scope(params: Params, arrays: Arrays) -> None:
    method = make("scope", query="cls", alpha=params["alpha"], combined=params["combined"])
    hidden, order = arrays["hidden"][:, 1:], arrays["order"]
    assert order.shape[1] == params["tokens_total"] // len(hidden)
    for x, heads, picks, kept in zip(hidden, arrays["cls_attention"], order, arrays["features"], strict=True):
        # the program takes the sum over heads
        tokens = of_tower(x, heads[:, 1:].sum(0))
        in_order(method, tokens, picks)
        close(method.reduce(tokens, torch.tensor([len(picks)])).apply(x[None])[0], kept)


def scope_qwen(params: Params, arrays: Arrays) -> None:
    """All pictures of the prompt in one selection."""
    queries, keys, bounds = arrays["vit_q"], arrays["vit_k"], arrays["cu_seqlens"].tolist()
    paid = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        q, k = queries[:, start:stop], keys[:, start:stop]
        # of a long picture the mean query
        q = q.mean(1, keepdim=True) if stop - start >= 6144 else q
        paid.append((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(0).sum(0))
    saliency = torch.cat(paid).unflatten(0, (-1, params["merge"] ** 2)).sum(1)[arrays["reverse_indices"]]
    close(saliency, arrays["saliency"])
    method = make("scope", query="all", alpha=params["alpha"], projected=True)
    x = arrays["embeds"]
    count = method.official_count(1 - params["ratio_removed"], len(x))
    assert count == len(arrays["kept"])
    in_order(method, one_unit(x, received_attention=saliency[None]), arrays["order"])
    same_set(arrays["order"], arrays["kept"])


def mmtok(params: Params, arrays: Arrays) -> None:
    names = ("alpha", "tv_temperature", "vv_temperature")
    method = make("mmtok", **{name: params[name] for name in names})
    x, text = arrays["vision"], arrays["text"][None]
    tokens = replace(
        one_unit(x),
        signals={"features": arrays["vision_encoder"][None, None]},
        question=text,
        question_valid=torch.ones(text.shape[:2], dtype=torch.bool),
    )
    ours = method.reduce(tokens, torch.tensor([params["tokens"]]))
    same_set(kept_of(ours), arrays["kept"])
    close(ours.apply(x[None])[0], arrays["features"])


def mmtok_padding(params: Params, arrays: Arrays) -> None:
    """Patches of padding are what is dropped first."""
    side = params["target"] // params["patch"]
    assert not params["include_overlap"]
    cells = torch.cartesian_prod(torch.tensor([0]), torch.arange(side), torch.arange(side))[None]
    x = torch.randn(side**2, 4, generator=torch.Generator().manual_seed(0))
    tokens = replace(
        one_unit(x), signals={"features": x[None, None]}, cells=cells, grid=torch.tensor([[1, side, side]])
    )
    lists = arrays["indices"].split(arrays["counts"].tolist())
    for size, padding in zip(arrays["sizes"].tolist(), lists, strict=True):
        method = make("mmtok", original=tuple(size), patch=params["patch"])
        kept = method.reduce(tokens, torch.tensor([side**2 - len(padding)])).kept[0]
        same_set((~kept).nonzero()[:, 0], padding)


def otprune(params: Params, arrays: Arrays) -> None:
    method, x = make("otprune", gamma=params["gamma"]), arrays["features"]
    assert method.official_count(params["ratio"], len(x)) == len(arrays["order"])
    in_order(method, one_unit(x), arrays["order"])
    same_set(arrays["order"], arrays["kept"])


def holov(params: Params, arrays: Arrays) -> None:
    method = make("holov", query="cls", crops=params["crops"], alpha=params["alpha"], beta=params["beta"])
    x, theirs = arrays["features"], arrays["output"] if "output" in arrays else None
    ours = method.reduce(one_unit(x, cls_attention=arrays["attention"][None]), torch.tensor([params["keep"]]))
    if "positions" in arrays:
        positions = arrays["positions"]
        short = bool((positions < 0).any())
    else:
        assert theirs is not None
        short = bool((theirs == 0).all(1).any())
        positions = torch.cdist(theirs, x).argmin(1)
    with fault(short, "where a crop is given more tokens than it has, the program pads with zero vectors"):
        same_set(kept_of(ours), positions)
    if "dropped" in arrays:
        same_set((~ours.kept[0]).nonzero()[:, 0], arrays["dropped"])


def mmr(params: Params, arrays: Arrays) -> None:
    method = make("mmr", query="cls", importance=params["mmr_lambda"], parallel=params["parallel_k"])
    x = arrays["embeds"]
    count = method.official_count(1 - params["ratio_removed"], len(x))
    ours = method.reduce(one_unit(x, cls_attention=arrays["scores"][None]), torch.tensor([count]))
    same_set(kept_of(ours), arrays["kept"])


def prunesid(params: Params, arrays: Arrays) -> None:
    method = make("prunesid", query="cls", score="attention")
    for x, heads, indices in zip(arrays["hidden"], arrays["cls_attention"], arrays["indices"], strict=True):
        assert indices[0] == 0 and len(indices) == params["tokens_with_cls"]
        tokens = of_tower(x[1:], heads[:, 1:].sum(0))
        same_set(kept_of(method.reduce(tokens, torch.tensor([len(indices) - 1]))), indices[1:] - 1)


def prunesid_qwen(params: Params, arrays: Arrays) -> None:
    x, method = arrays["features"], make("prunesid", score="component")
    count = max(16, method.official_count(params["tokens_of_576"] / 576, len(x)))
    assert count == params["tokens"]
    same_set(kept_of(method.reduce(one_unit(x), torch.tensor([count]))), arrays["indices"])


def restore_anchors(params: Params, arrays: Arrays) -> None:
    """All tokens are merged: of twice the budget the base keeps none of its half."""
    x, theirs = arrays["features"], arrays["anchors"]
    none = {"retained": lambda self, tokens, count: torch.zeros_like(tokens.valid)}
    method = make("restore-merge", given=none)
    assert torch.equal(method.owners(x, params["anchors"]), theirs[arrays["owner"]])
    ours = method.reduce(one_unit(x), torch.tensor([2 * params["anchors"]]))
    # their groups are in the order of anchors, ours at a member of each
    order = arrays["owner"][kept_of(ours)]
    close(ours.apply(x[None])[0], arrays["merged"][order])
    close(ours.mass()[0][kept_of(ours)], arrays["sizes"][order])


def restore(params: Params, arrays: Arrays) -> None:
    """The reduction and the calibrated attention of a prompt, the picture behind the system's tokens."""
    x, text, front, count = arrays["features"], arrays["text"], params["system_tokens"], params["n_vis"]
    signals = {} if "attention" not in arrays else {"cls_attention": arrays["attention"].mean(0)[None]}
    method = make("restore-merge", base=params["base"], query="cls")
    ours = method.reduce(one_unit(x, **signals), torch.tensor([count]))
    kept, owner = kept_of(ours), ours.owner()[0]
    assert bool((arrays["in_slot"] == 1).all())
    assert torch.equal(kept[arrays["owner"]], owner)
    close(ours.apply(x[None])[0], arrays["visual"])
    # the prompt at its places
    size, whole = len(x), len(x) + len(text)
    places = torch.cat([torch.arange(front), front + kept, torch.arange(front + size, whole)])
    assert torch.equal(places, arrays["positions"])
    prompt = _prompt(ours, front, whole)
    WeighTokens(prompt).before_text(TextInputs({"inputs_embeds": torch.zeros(1, whole, x.shape[1])}))
    incoming = prompt.incoming
    assert incoming.weights is not None and incoming.first_weights is not None and incoming.by_distance
    close(incoming.weights[0, places].exp(), arrays["sizes"])
    close(incoming.first_weights[0, places].exp(), arrays["sizes_layer0"])
    factor = run("distance_factor", places[None], places[None, None], whole)[0, 0]
    close(factor.tril(), arrays["bias"].tril())
    index = KeyIndex(places[None].int(), False, len(places))
    added = index.weighed(incoming.weights, None, len(places))[0, 0] + factor
    hidden = torch.cat([text[:front], ours.apply(x[None])[0], text[front:]])
    query, key, value = (
        (hidden @ arrays[name].T).unflatten(-1, (params["heads"], -1)).transpose(0, 1)[None]
        for name in ("wq", "wk", "wv")
    )
    angles = places[:, None] * params["rope_base"] ** -(torch.arange(0, key.shape[3], 2) / key.shape[3])
    cosine, sine = (torch.cat([turn, turn], -1) for turn in (angles.cos(), angles.sin()))
    half = key.shape[3] // 2
    query, key = (one * cosine + torch.cat([-one[..., half:], one[..., :half]], -1) * sine for one in (query, key))
    made = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=added)
    close(made[0].transpose(0, 1).flatten(1) @ arrays["wo"].T, arrays["attention_layer1"])


def _prompt(reduction: Reduction, front: int, whole: int) -> Any:
    """A prompt of ``whole`` tokens with a picture behind ``front`` of them, of which ``reduction`` is left."""
    size = reduction.kept.shape[1]
    tile, valid = Tile.raster(1, 1, size, offset=0), torch.ones(1, whole, dtype=torch.bool)
    layout = Layout(valid, [Segment(0, "image", 0, tile, torch.arange(front, front + size))])
    links = reduction.links
    assert links is not None
    kept = valid.clone()
    kept[:, front : front + size] = reduction.kept
    total = Reduction(kept, valid, Links(links.batch, links.slot + front, links.source + front, links.weight))
    return SimpleNamespace(
        layout=layout,
        total=total,
        state=None,
        seen=0,
        incoming=ForwardInfo(0, whole, False),
        measured=lambda *given: nullcontext(),
        plan=SimpleNamespace(
            recipe=SimpleNamespace(proportional="restore"),
            family=SimpleNamespace(entering=lambda embeds, planes: embeds),
        ),
    )


_SLIM = "angelslim/compressor/token_compressor/algorithm"
_LLAVA = "prunesid/prunesid_llava/clip_encoder.py:CLIPVisionTower_PruneSID.forward, batch_pca, batch_similarity_nms"
_QWEN = "prunesid/prunesid_qwen/modeling_qwen2_vl.py:Qwen2VisionTransformerPretrainedModel_prunesid.forward"

_RESTORE = "llava/model/modeling_llama_restore.py:forward_restore, reorder_vis_position_ids, LlamaSdpaAttention.forward"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("kinredon/SCOPE", "scope/clip_encoder.py:CLIPVisionTower_SCOPE.forward, SCOPE"): scope,
    (
        "Tencent/AngelSlim",
        f"{_SLIM}/scope.py:scope_pruning, SCOPE; utils/utils.py:_recompute_attention_maps_for_all_images",
    ): scope_qwen,
    ("Tencent/AngelSlim", f"{_SLIM}/idpruner.py:idpruner"): mmr,
    ("Ironieser/MMTok", "mmtok/core/semantic_selector.py:SemanticTokenSelector.mm_coverage_selection"): mmtok,
    ("Ironieser/MMTok", "mmtok/llava/patch_llava.py:calculate_padding_patch_indices"): mmtok_padding,
    ("xiwenc1/OTPrune", "LLaVA/llava/model/llava_arch.py:OTPrune, greedy_select"): otprune,
    ("obananas/HoloV", "qwen-model-HoloV/utils.py:HoloV"): holov,
    ("obananas/HoloV", "llava/model/utils.py:HoloV"): holov,
    ("cvlab-yonsei/RESTORE", "tokenreduction/tore/holov/utils.py:HoloV_with_Indices"): holov,
    (
        "cvlab-yonsei/RESTORE",
        "tokenreduction/tore/merge.py:distinctive_anchor_merging, merge_wavg, merge_source",
    ): restore_anchors,
    ("cvlab-yonsei/RESTORE", f"tokenreduction/tore/divprune/llava_arch_restore.py; {_RESTORE}"): restore,
    ("cvlab-yonsei/RESTORE", f"tokenreduction/tore/holov/llava_arch_restore.py; {_RESTORE}"): restore,
    ("ZhengyaoFang/PruneSID", _LLAVA): prunesid,
    ("ZhengyaoFang/PruneSID", f"{_QWEN}, pca_group, nms"): prunesid_qwen,
}
