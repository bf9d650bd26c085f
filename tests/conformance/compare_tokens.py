"""Selectors of which a part looks at a picture and a part at the prompt, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

import torch
from comparators import Arrays, Params, close, kept_of, one_unit, same_rows, same_set
from harness import as_queries, make
from torch import Tensor

from mmaccel.core.layout import Tile
from mmaccel.layers.dart import DART
from mmaccel.method import LayerAttention, TokenBatch
from mmaccel.pruning.visiontrim import adaptive, local_importance


def budget(count: int) -> Tensor:
    return torch.tensor([count])


def picture(side: int, features: Tensor, **signals: Tensor) -> TokenBatch:
    """A batch of one square picture."""
    cells = Tile.raster(1, side, side, 0).cells
    return replace(one_unit(features, **signals), cells=cells[None], grid=torch.tensor([[1, side, side]]))


def everyone(rows: Tensor, text: Tensor | None = None) -> LayerAttention:
    """A layer in which every query sees every key, with the probabilities ``rows [B, H, q, K]``."""
    seen = torch.ones(1, 1, *rows.shape[2:], dtype=torch.bool)
    text = torch.ones(1, rows.shape[2], dtype=torch.bool) if text is None else text
    return LayerAttention(*as_queries(rows.log()), seen, 1.0, text)


def fastervlm(params: Params, arrays: Arrays) -> None:
    scores = arrays["cls_attention"].mean(1)
    close(scores, arrays["scores"])
    for score, mask in zip(scores, arrays["mask"], strict=True):
        tokens = one_unit(torch.zeros(len(score), 1), cls_attention=score[None])
        kept = make("fastervlm").reduce(tokens, budget(params["visual_token_num"])).kept[0]
        assert torch.equal(kept, mask)


def hiprune(params: Params, arrays: Arrays) -> None:
    # the mean over heads and queries is what a tap delivers
    middle, deep = (arrays[f"{which}_attention"].mean((1, 2))[:, 1:] for which in ("object", "deep"))
    method = make("hiprune", alpha=params["alpha"])
    count = method.official_count(params["retention"] / middle.numel(), middle.shape[1])
    assert count == params["retention"] // len(middle)
    for tile, mask in enumerate(arrays["mask"]):
        signal = torch.stack([middle[tile], deep[tile]])
        tokens = picture(params["grid"], torch.zeros(middle.shape[1], 1), received_attention=signal)
        kept = method.reduce(tokens, budget(count)).kept[0]
        assert int(kept.sum()) == int(arrays["counts"][tile])
        assert torch.equal(kept, mask)


def dart(params: Params, arrays: Arrays) -> None:
    """In the order in which the program came to serve its pivots."""
    first, size = params["image_token_start_index"], params["image_token_length"]
    last, hidden, keys = first + size, arrays["last_layer_state"][0], arrays["k_states"]
    # absolute places as the method numbers them: visual slots, then the words behind the picture
    order = arrays["pivot_order"] - first

    def serve(self: DART, slots: Tensor, mine: Tensor, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        served, turn = DART.serve(self, slots, mine, tokens)
        same_set(served[0], order)
        return order[None], torch.ones_like(turn)

    pivots = {"image_pivots": params["pivot_image_token"], "text_pivots": params["pivot_text_token"]}
    method = make("dart", {"serve": serve}, **pivots)
    # only the keys are looked at
    attention = LayerAttention(keys, keys, None, 1.0, torch.ones(1, len(hidden), dtype=torch.bool))
    norm = method.observe(attention)["key_norm"]
    tokens = replace(
        one_unit(hidden[first:last], key_norm=norm[0, first:last]),
        question=hidden[None, last:],
        question_valid=torch.ones(1, len(hidden) - last, dtype=torch.bool),
        question_signals={"key_norm": norm[:, last:]},
    )
    slots, _ = method.pivots(norm[:, first:last], tokens.valid, budget(size))
    assert torch.equal(slots[0] + first, arrays["image_pivots"])
    most = params["max_num_trunction"]
    count = method.official_count(most / size if most else 1 - params["reduction_ratio"], size)
    assert count == len(arrays["kept"]) == sum(pivots.values()) * params["per_pivot"] + pivots["image_pivots"]
    same_set(kept_of(method.reduce(tokens, budget(count))) + first, arrays["kept"])


def vflowopt(params: Params, arrays: Arrays) -> None:
    """A base image and its tiles; newlines are the last column of their grid."""
    x, score = arrays["features"], arrays["importance"]
    base = params["base_side"]
    parts = [Tile.raster(1, base, base, 0).cells, Tile.raster(1, params["local_h"], params["local_w"], 0).cells]
    method = make("vflowopt-merge", cell=params["m"])
    tokens = replace(
        one_unit(x, received_attention=score[None]),
        cells=torch.cat(parts)[None],
        segment=torch.repeat_interleave(torch.arange(2), torch.tensor([len(part) for part in parts]))[None],
    )
    # the program keeps one token of each cell on top of what it does not drop: the same drop, told by what it leaves
    dropped = len(x) - method.official_count(params["r"], len(x)) + int(len(x) / params["m"] ** 2)
    cells = method.number(tokens)[0][score.argsort()[:dropped]].unique().numel()
    count = len(x) - dropped + cells
    assert count == len(arrays["out"])
    ours = method.reduce(tokens, budget(count))
    assert torch.equal(ours.kept[0], arrays["keep_mask"])
    close(ours.apply(x[None])[0], arrays["out"])


def visiontrim(params: Params, arrays: Arrays) -> None:
    attention, x, words = arrays["attention"][0], arrays["features"][0], arrays["text"]
    between = attention[1:, 1:]
    received = (between.sum(0) - between.diagonal()) / (len(x) - 1)
    tokens = replace(
        picture(isqrt(len(x)), x, cls_attention=attention[:1, 1:], patch_attention=received[None]),
        question=words,
        question_valid=torch.ones(words.shape[:2], dtype=torch.bool),
    )
    # the program projects as it is, the norm that is part of CLIP's projection is not in the vector
    tokens.signals.update(patches=(x @ arrays["visual_projection"].T)[None])  # type: ignore[attr-defined]
    dominant, merged = params["DVTS_token_num"], params["TGVC_token_num"]
    given = {"clip": "given by the vector", "query": "cls"}
    method = make("visiontrim", complement=merged, **given)
    ours = method.reduce(tokens, budget(dominant + merged))
    same_rows(ours.apply(x[None])[0], arrays["out"][0])
    alone = make("visiontrim", complement=0, **given).reduce(tokens, budget(dominant))
    same_set(kept_of(alone), arrays["kept"])
    # what the program computes and does not use
    local = local_importance(x[None], tokens, tokens.valid)
    torch.testing.assert_close(local.float(), arrays["local_importance"], rtol=1e-4, atol=1e-6)
    close(adaptive(attention[None, 0, 1:], local, tokens.valid), arrays["adaptive_importance"])


def vasparse(params: Params, arrays: Arrays) -> None:
    first, size = params["v_token_start"], params["v_token_num"]
    method = make("vasparse")
    seen = method.observe(everyone(arrays["attn"]))["received_mean"][0, first : first + size]
    close(seen, arrays["mean_attn"][0])
    count = method.official_count(params["sparse_ratio"], size)
    kept = method.reduce(one_unit(seen[:, None], received_mean=seen), budget(count)).kept[0]
    assert torch.equal(kept, arrays["mask"][0])


_LLAVA = "llava/model/llava_arch.py:encode_images"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("Theia-4869/FasterVLM", _LLAVA): fastervlm,
    # with the rule of FasterVLM
    ("Danielement321/HiPrune", _LLAVA): fastervlm,
    ("Danielement321/HiPrune", f"LLaVA/{_LLAVA}"): hiprune,
    ("ZichenWen1/DART", "llava/model/language_model/modeling_llama_self.py:get_retained_image_token"): dart,
    (
        "Danielement321/HiPrune",
        "Qwen2-VL/Qwen2VL_DART/modeling_qwen2_vl_self.py:get_retained_image_token",
    ): dart,
    (
        "sihany077/VFlowOpt",
        "src/LLaVA-OneVision/llava/model/language_model/llava_qwen_training_free.py:prepare_inputs_labels_for_multimodal "
        "(merge block)",
    ): vflowopt,
    (
        "hanxunyu/VisionTrim",
        "llava/model/multimodal_encoder/clip_encoder.py:token_prune_visiontrim (+ build_token_affinity, combine_importance)",
    ): visiontrim,
    ("mengchuang123/VASparse-github", "minigpt4/sparse/utils.py:attn_postprocess_rank_vasparse_visual"): vasparse,
}
