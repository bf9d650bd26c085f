"""Selectors between the encoder and the language model, against the authors' programs.

Positions are compared exactly; features within 1e-4 relative (see ``close``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

import torch
from comparators import Arrays, Params, close, one_unit, same_rows, same_set
from harness import fault, make
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.method import TokenBatch


def budget(count: int) -> Tensor:
    return torch.tensor([count])


def hired(params: Params, arrays: Arrays) -> None:
    early, late = (arrays[f"attn_{which}_layer_cls"][..., 1:].mean(1) for which in ("first", "last"))
    parts, n = late.shape
    side = isqrt(n)
    assert parts == params["partitions"] and n == params["num_vision_tokens"] == side * side
    method = make("hired", alpha=params["alpha"])
    count = max(1, method.official_count(params["token_budget_rate"], parts * n))
    # which band belongs to which tile does not depend on how the tiles stand, so they stand in a column
    tile, cells = torch.arange(parts)[:, None], torch.cartesian_prod(torch.tensor([0]), *[torch.arange(side)] * 2)
    cells = cells.repeat(parts, 1, 1)
    cells[1:, :, 1] += side * (tile[1:] - 1)
    tokens = TokenBatch(
        features=torch.zeros(1, parts * n, 1),
        valid=torch.ones(1, parts * n, dtype=torch.bool),
        cells=cells.reshape(1, parts * n, 3),
        grid=torch.tensor([[1, side * max(1, parts - 1), side]]),
        segment=(tile > 0).long().expand(parts, n).reshape(1, parts * n),
        tile=tile.expand(parts, n).reshape(1, parts * n),
        signals={"cls_attention": torch.stack([early.flatten(), late.flatten()])[None]},
    )
    mask = method.reduce(tokens, budget(count)).kept.reshape(parts, n)
    assert torch.equal(mask, arrays["mask"])
    assert torch.equal(mask.sum(1), arrays["kept_per_partition"].long())
    assert torch.equal(mask.sum(1)[1:], arrays["sub_budgets"].long())


def hired_single(params: Params, arrays: Arrays) -> None:
    late = arrays["attn_last_layer_cls"][:, 1:].mean(0)
    method = make("hired")
    count = max(1, method.official_count(params["token_budget_rate"], len(late)))
    assert count == params.get("k", count) == int(arrays["mask"].sum())
    tokens = one_unit(torch.zeros(len(late), 1), cls_attention=torch.stack([torch.full_like(late, torch.nan), late]))
    assert torch.equal(method.reduce(tokens, budget(count)).kept[0], arrays["mask"])


def prumerge(name: str) -> Callable[[Params, Arrays], None]:
    def compare(params: Params, arrays: Arrays) -> None:
        query, keys, x = arrays["q_last_cls"], arrays["k_last"], arrays["features"]
        n = len(x)
        # the program does not split heads
        attention = (query @ keys.T * keys.shape[1] ** -0.5).softmax(-1)[0, 1:]
        close(attention, arrays["cls_attn"])
        tokens = one_unit(x, cls_attention_unsplit=attention[None], keys_unsplit=keys[None, 1:])
        fixed = not params.get("if_adaptive", True)
        method = make(name, adaptive=not fixed, neighbours=params.get("knn", 32))
        wrong, count = None, n
        if fixed:
            count = method.official_count(next(params[k] for k in ("reduction_ratio", "iqr_ratio") if k in params), n)
            if name == "prumerge-plus":
                wrong = "with a fixed ratio PruMerge+ chooses tokens twice"
        else:
            found = int((attention > _fence(attention)).sum())
            if int(n * (found / n)) != found:
                wrong = "int(N * (m / N)) loses one of the m outliers in floating point"
            elif int(1 / (found / n)) != n // found:
                wrong = "int(1 / (m / N)) is not N // m in floating point"
        with fault(wrong, str(wrong)):
            reduction = method.reduce(tokens, budget(count))
            assert int(reduction.kept.sum()) == len(arrays["out"])
            same_rows(reduction.apply(x[None])[0], arrays["out"])

    return compare


def _fence(values: Tensor) -> Tensor:
    low, high = values.quantile(torch.tensor([0.25, 0.75]))
    return high + 1.5 * (high - low)


def visionzip(params: Params, arrays: Arrays) -> None:
    attention, hidden, metric = arrays["cls_attn"].mean(0)[1:], arrays["hidden"], arrays["metric"][1:]
    dominant, contextual = params["dominant_num_without_cls"], params["contextual_num"]
    x = hidden[1:]
    tokens = one_unit(x, cls_attention=attention[None], keys=metric[None])
    ours = make("visionzip", contextual=contextual).reduce(tokens, budget(min(dominant + contextual, len(x))))
    # theirs also keep the CLS token
    close(hidden[0], arrays["out"][0])
    same_rows(ours.apply(x[None])[0], arrays["out"][1:])
    # no contextual token: what stays is what dominates
    alone = make("visionzip", contextual=0).reduce(tokens, budget(dominant)).kept[0].nonzero()[:, 0]
    same_set(torch.cat([torch.tensor([0]), alone + 1]), arrays["keep_idx"])


def vispruner(params: Params, arrays: Arrays) -> None:
    attention, features = arrays["cls_attn"].mean(0), arrays["features"]
    method = make("vispruner", important=params["important_ratio"], step=params.get("prune_step", 8))
    tokens = one_unit(features, cls_attention=attention[None])
    tokens = replace(tokens, signals={**tokens.signals, "features": features[None, None]})
    kept = method.reduce(tokens, budget(params["visual_token_num"])).kept[0]
    assert torch.equal(kept, arrays["mask"])


def cdpruner(params: Params, arrays: Arrays) -> None:
    """With CLIP, whose cosine the program negates."""
    x, words, count = arrays["features"], arrays["text_embeds"][None], params["visual_token_num"]
    tokens = replace(
        one_unit(x, patches=arrays["image_embeds"]),
        question=words,
        question_valid=torch.ones(words.shape[:2], dtype=torch.bool),
    )
    ours = make("cdpruner", clip="given by the vector").reduce(tokens, budget(count)).kept[0]
    assert int(ours.sum()) == count
    with fault(count > _rank(x), "beyond the rank of the kernel the program divides by zero"):
        assert torch.equal(ours, arrays["mask"])


def _rank(x: Tensor) -> int:
    return int(torch.linalg.matrix_rank(normalize(x, dim=-1)))


_NEXT = "transformers/src/transformers/models/llava_next/modeling_llava_next.py"
_CLIP = "llava/model/multimodal_encoder/clip_encoder.py:CLIPVisionTower"
_ENCODE = "llava/model/llava_arch.py:LlavaMetaForCausalLM.encode_images"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("hasanar1f/HiRED", f"{_NEXT}:HiRED_token_selection (+HiRED_sub_img_budgets)"): hired,
    (
        "hasanar1f/HiRED",
        "transformers/src/transformers/models/llava/modeling_llava.py:HiRED_token_selection",
    ): hired_single,
    ("42Shawn/LLaVA-PruMerge", f"{_CLIP}.token_prune_merge_advanced"): prumerge("prumerge"),
    ("42Shawn/LLaVA-PruMerge", f"{_CLIP}.token_prune_merge_advanced_plus"): prumerge("prumerge-plus"),
    ("dvlab-research/VisionZip", "visionzip/clip_encoder.py:CLIPVisionTower_VisionZip.forward"): visionzip,
    ("Theia-4869/VisPruner", _ENCODE): vispruner,
    ("Theia-4869/CDPruner", _ENCODE): cdpruner,
}
