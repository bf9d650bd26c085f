"""Selectors of 2025 and 2026 between layers of the language model, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from comparators import Arrays, Params, close, kept_of, one_unit, same_set
from harness import make, paid
from torch import Tensor

from mmaccel.method import LayerAttention


def text_around(length: int, start: int, stop: int) -> Tensor:
    """``[1, length]`` bool: all but the picture."""
    place = torch.arange(length)
    return ((place < start) | (place >= stop))[None]


def priortr(skip_last: bool) -> Callable[[Params, Arrays], None]:
    def compare(params: Params, arrays: Arrays) -> None:
        first, last = params["image_start"], params["image_end"]
        method = make(
            "priortr", query=params["query_aggregation"], heads=params["head_aggregation"], skip_last=skip_last
        )
        rows = arrays["attention"].log()[None]
        seen = method.observe(paid(rows, text_around(rows.shape[2], first, last)))
        span = {name: x[0, first:last] for name, x in seen.items()}
        p, q = (span[name] / (span[name].sum() + 1e-10) for name in ("question", "prior"))
        close(p * ((p + 1e-10) / (q + 1e-10)).log(), arrays["scores"])
        size = last - first
        ratio = params["keep_ratio"]
        count = min(size, params["keep_tokens"]) if ratio is None else max(1, method.official_count(ratio, size))
        ours = method.reduce(one_unit(torch.zeros(size, 1), **span), torch.tensor([count]))
        same_set(kept_of(ours), arrays["kept"])

    return compare


def v2drop(params: Params, arrays: Arrays) -> None:
    start, stop = params["start"], params["start"] + params["length"]
    states, left = arrays["embeds"], torch.arange(params["length"])
    at = dict(zip(params["layers"], params["ratios"], strict=True))
    before = states
    for number, weight in enumerate(arrays["W"]):
        if (ratio := at.get(number)) is not None:
            method = make("v2drop-step", layer=number)
            assert method.compares_with == number - 1
            span = slice(start, start + len(left))
            count = max(1, method.official_count(ratio, len(left)))
            tokens = replace(one_unit(states[span]), signals={"before": before[span][None, None]})
            kept = kept_of(method.reduce(tokens, torch.tensor([count])))
            left = left[kept]
            same_set(left, arrays[f"kept_{number}"])
            states = torch.cat([states[:start], states[span][kept], states[span.stop :]])
        before, states = states, states + (states @ weight).tanh()
    assert stop <= len(arrays["embeds"])


def clse(params: Params, arrays: Arrays) -> None:
    method = make("clse-step", score=params["score_type"], cutoff=params["cutoff"], temperature=params["temperature"])
    frames, height, width = params["grid"]
    cells = torch.cartesian_prod(*(torch.arange(side) for side in (frames, height, width)))
    high = [method.high(arrays[name], params["grid"]) for name in ("z_ref", "z_cur")]
    for ours, name in zip(high, ("high_ref", "high_cur"), strict=True):
        close(ours, arrays[name])
    close(method.evolution(*high), arrays["evolution"])
    tokens = replace(
        one_unit(arrays["z_cur"], prompt_attention=arrays["attention"]),
        cells=cells[None],
        grid=torch.tensor([params["grid"]]),
    )
    tokens = replace(tokens, signals={**tokens.signals, "before": arrays["z_ref"][None, None]})
    same_set(kept_of(method.reduce(tokens, torch.tensor([params["keep"]]))), arrays["kept"])


def hawk_kept(
    weights: Tensor, attention: LayerAttention, start: int, size: int, ratio: float, **options: str
) -> Tensor:
    method = make("hawk", weights=tuple(weights.tolist()), **options)
    scores = method.observe(attention)["question_logits"][0, start : start + size]
    count = max(1, method.official_count(ratio, size))
    return kept_of(method.reduce(one_unit(scores[:, None], question_logits=scores), torch.tensor([count])))


def hawk(params: Params, arrays: Arrays) -> None:
    """Queries of text, keys of a picture in front of it."""
    q, k = arrays["q"], arrays["k"]
    size, asked = k.shape[2], q.shape[2]
    attention = LayerAttention(
        torch.nn.functional.pad(q, (0, 0, size, 0)),
        torch.nn.functional.pad(k, (0, 0, 0, asked)),
        None,
        q.shape[3] ** -0.5,
        text_around(size + asked, 0, size),
    )
    method = make("hawk", weights=tuple(arrays["weights"].tolist()), normalization=params["normalization"])
    close(method.observe(attention)["question_logits"][0, :size], arrays["scores"])
    form = {"normalization": params["normalization"]}
    same_set(hawk_kept(arrays["weights"], attention, 0, size, params["keep_ratio"], **form), arrays["kept"])


def hawk_prefill(params: Params, arrays: Arrays) -> None:
    """The first layer's norm and projections, given by their weights."""
    ids, x = arrays["ids"], arrays["embeds"]
    x = x * (x.square().mean(-1, keepdim=True) + params["rms_eps"]).rsqrt() * arrays["norm"]
    heads = (("wq", "bq", params["heads"]), ("wk", "bk", params["kv_heads"]))
    query, key = ((x @ arrays[w].T + arrays[b]).unflatten(1, (n, -1)).transpose(0, 1)[None] for w, b, n in heads)
    visual = (ids == params["image"]) | (ids == params["video"])
    after = int((ids == params["vision_end"]).nonzero().max()) + 1
    ends = (ids == params["im_end"]).nonzero()[:, 0]
    end = int(ends.max()) if len(ends) and int(ends.max()) > after else len(ids)
    # the program's question: what the chat template puts behind it is not read
    place = torch.arange(len(ids))
    text = ((place >= after) & (place < end) & ~visual)[None]
    assert int(text.sum()) == int(arrays["query_count"])
    sees = (text | visual)[:, None, :, None].expand(1, 1, len(ids), len(ids))
    attention = LayerAttention(query, key, sees, query.shape[3] ** -0.5, text)
    scores = make("hawk", weights=tuple(arrays["weights"].tolist())).observe(attention)["question_logits"][0, visual]
    method = make("hawk", weights=tuple(arrays["weights"].tolist()))
    size = int(visual.sum())
    count = max(1, method.official_count(params["keep_ratio"], size))
    kept = kept_of(method.reduce(one_unit(scores[:, None], question_logits=scores), torch.tensor([count])))
    same_set(torch.cat([place[~visual], place[visual][kept]]), arrays["kept"])


def apet(params: Params, arrays: Arrays) -> None:
    method = make(
        "apet-merge",
        basis=params["basis"],
        ridge=params["ridge"],
        start=int(arrays["start"][0]),
        basis_slots="overwrite",
    )
    for x, mask, theirs in zip(arrays["hidden"][:, 1:], arrays["mask"], arrays["features"], strict=True):
        ours = method.reduce(one_unit(x), torch.tensor([params["tokens"]]))
        assert torch.equal(ours.kept[0], mask)
        close(ours.apply(x[None])[0], theirs)


def apet_layer(params: Params, arrays: Arrays) -> None:
    first, last = params["image_start"], params["image_start"] + params["image_length"]
    method = make(
        "apet-step",
        basis=params["basis"],
        ridge=params["ridge"],
        start=int(arrays["start"][0]),
        basis_slots="mix" if "basis_mix" in params else "overwrite",
    )
    hidden = arrays["hidden"]
    ours = method.reduce(one_unit(hidden[first:last]), torch.tensor([params["keep"]]))
    close(torch.cat([hidden[:first], ours.apply(hidden[None, first:last])[0], hidden[last:]]), arrays["output"])
    if "positions_kept" in arrays:
        places = torch.cat([torch.arange(first), kept_of(ours) + first, torch.arange(last, len(hidden))])
        assert torch.equal(arrays["positions"][:, places], arrays["positions_kept"])


def ivcprune(form: str) -> Callable[[Params, Arrays], None]:
    def compare(params: Params, arrays: Arrays) -> None:
        length, first = params["sequence"], params["image_start"]
        size = params["image_length"] if form == "union" else params["grid"][0] * params["grid"][1]
        shares = {"seeds": params["seed_ratio"], "coordinates": params["coordinate_ratio"]}
        shares |= {"foreground": params["foreground_ratio"]} if form == "union" else {}
        method = make("ivcprune-select", form=form, skip=params["skip_after_image"], **shares)
        value = arrays["values"].transpose(0, 1)[None]
        attention = LayerAttention(value, value, None, 1.0, text_around(length, first, first + size), value=value)
        places = arrays["positions"] if "positions" in arrays else torch.arange(length)[None]
        dims = torch.arange(0, params["head_dim"], 2) / params["head_dim"]
        angles = places[..., None] / params["rope_base"] ** dims
        figures = method.observe(attention) | {
            "rotary_cos": angles.cos().mean((0, 2))[None],
            "rotary_sin": angles.sin().mean((0, 2))[None],
        }
        span = {name: x[0, first : first + size] for name, x in figures.items()}
        theirs = arrays["kept"]
        if form == "fill":
            assert method.official_count(params["total_ratio"], size) == len(theirs)
        same_set(kept_of(method.reduce(one_unit(torch.zeros(size, 1), **span), torch.tensor([len(theirs)]))), theirs)

    return compare


_IVC = "transformers/src/transformers/models"
_QWEN_IVC = "Qwen2_5_VLModel.IVCP_forward_flashattention, calculate_avg_similarity_for_subset_einsum"
_SPECTRUM = "tools.py:spatial_spectral_score_2d, get_evolution_factor, calculate_evolution_score"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("CodeChildCZJ/PriorTR", "image/LLaVA/llava/vtr/strategy/priortr.py:compute_scores, select_tokens"): priortr(False),
    (
        "CodeChildCZJ/PriorTR",
        "image/Qwen3-VL/visual_token_pruning/strategy/priortr.py:compute_scores, select_tokens",
    ): priortr(True),
    ("xuyang-liu16/V2Drop", "Qwen2-VL/Qwen2VL_V2Drop/modeling_qwen2_vl_self.py:DART.forward"): v2drop,
    ("zjubinchen/CLSE", f"LLaVA1.5/llava/model/language_model/{_SPECTRUM}"): clse,
    ("zjubinchen/CLSE", f"Qwen2VL/{_SPECTRUM}"): clse,
    ("peppery77/HAWK", "src/hawk/pruning.py:compute_hawk_scores, select_keep_indices"): hawk,
    ("peppery77/HAWK", "src/hawk/pruning.py:prune_qwen_prefill"): hawk_prefill,
    (
        "MaQianKun0/ApET",
        "llava/model/llava_arch.py:encode_images, token_merging; llava/model/utils.py:fps",
    ): apet,
    ("MaQianKun0/ApET", "llava/model/modeling_llama_x.py:layer_prune, token_merging"): apet_layer,
    (
        "MaQianKun0/ApET",
        "qwen/model/qwen2_5_vl_custom.py:layer_prune; qwen2_5_vl_utils.py:token_merging, fps",
    ): apet_layer,
    (
        "FireRedTeam/IVC-Prune",
        f"{_IVC}/llama/modeling_llama.py:LlamaModel.IVCP_forward_flashattention, compute_attention_weights",
    ): ivcprune("union"),
    ("FireRedTeam/IVC-Prune", f"{_IVC}/qwen2_5_vl/modeling_qwen2_5_vl.py:{_QWEN_IVC}"): ivcprune("fill"),
}
