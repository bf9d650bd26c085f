"""Methods of 2026 for clips, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import torch
from comparators import Arrays, Params, close, kept_of, one_unit, same_set
from harness import fault, make
from torch import Tensor

from mmaccel.method import TokenBatch


def film(features: Tensor, grid: tuple[int, int] | None = None, **signals: Tensor) -> TokenBatch:
    """A clip of ``features [T, P, D]`` in frames of ``grid``, by default one row; signals ``[T, P]``."""
    frames, places, width = features.shape
    height, across = grid or (1, places)
    cells = torch.cartesian_prod(*(torch.arange(side) for side in (frames, height, across)))
    tokens = one_unit(features.reshape(-1, width), **{name: x.reshape(1, -1) for name, x in signals.items()})
    return replace(tokens, cells=cells[None], grid=torch.tensor([[frames, height, across]]))


def vcast(params: Params, arrays: Arrays) -> None:
    x = arrays["features"]
    method = make("vcast", temperature=params["budget_temp"], least=params["min_k"])
    path = torch.nn.functional.normalize(x.mean(1), dim=-1)
    close(method.curvature(path), arrays["curvature"])
    close(method.weights(path), arrays["weights"])
    tokens = film(x)
    count = method.official_count(params["retain_ratio"], x.shape[0] * x.shape[1], (len(x), 1, x.shape[1]))
    ours = method.reduce(tokens, torch.tensor([count]))
    same_set(kept_of(ours), arrays["kept"])
    assert torch.equal(ours.kept.view(len(x), -1).sum(1), arrays["keep_counts"].long())
    for name in ("features", "deepstack"):
        out = arrays["out" if name == "features" else "deepstack_out"]
        close(ours.apply(arrays[name].flatten(0, 1)[None])[0], out)


def vcast_videos(params: Params, arrays: Arrays) -> None:
    method, side, start, kept = make("vcast", least=params["min_k"]), params["spatial_merge_size"], 0, []
    for t, h, w in arrays["grid_thw"].tolist():
        grid = t, h // side, w // side
        size = grid[0] * grid[1] * grid[2]
        x = arrays["features"][start : start + size].view(grid[0], -1, arrays["features"].shape[1])
        count = method.official_count(params["retain_ratio"], size, grid)
        kept.append(kept_of(method.reduce(film(x, grid[1:]), torch.tensor([count]))) + start)
        start += size
    same_set(torch.cat(kept), arrays["kept"])
    close(arrays["features"][torch.cat(kept)], arrays["out"])


def forestprune(params: Params, arrays: Arrays) -> None:
    method = make("forestprune", thinned=params["k_intra"], similarity=params["tau"], nearness=params["tau_spatial"])
    x, grid = arrays["features"], tuple(params["grid"])
    for frame, theirs, nodes in zip(x, arrays["intra_scores"], arrays["intra"], strict=True):
        close(method.worth(frame), theirs)
        same_set(method.worth(frame).topk(len(nodes)).indices, nodes)
    count = method.official_count(params["keep_ratio"], x.shape[0] * x.shape[1], (len(x), *grid))
    assert count == len(arrays["keep_nodes"])
    ours = kept_of(method.reduce(film(x, grid), torch.tensor([count])))
    # their nodes are numbered among those that the first step leaves
    at = (arrays["intra"].sort(1).values + torch.arange(len(x))[:, None] * x.shape[1]).flatten()
    same_set(ours, at[arrays["keep_nodes"]])
    assert torch.equal(torch.bincount(ours // x.shape[1], minlength=len(x)), arrays["keep_counts"].long())


def flashvid(params: Params, arrays: Arrays) -> None:
    """With the chains' count as shipped."""
    whole = params.get("do_segment", True) is False
    method = make(
        "flashvid-merge",
        query="all",
        threshold=-1.0 if whole else params["segment_threshold"],
        segments=1 if whole else params["min_segment_num"],
        alpha=params["alpha"],
        tau=params["temporal_threshold"],
        selection=params["token_selection_method"],
    )
    x = arrays["features"]
    lengths = [last - first + 1 for first, last in method.cut(x, torch.ones(x.shape[:2], dtype=torch.bool))]
    assert lengths == arrays["segment_lengths"].tolist()
    retain = params["retention_ratio"] * params["expansion"]
    assert ceil(x.shape[1] * retain) == params["num_attn_div_tokens"] + params["num_sttm_tokens"]
    count = method.official_count(retain, x.shape[0] * x.shape[1], (len(x), 1, x.shape[1]))
    ours = method.reduce(film(x, received_attention=arrays["cls_attention"]), torch.tensor([count]))
    theirs = arrays["keep"]
    with fault(1 in lengths, "of a segment of one frame picks are clustered again, and a place may come out twice"):
        same_set(kept_of(ours), theirs)
        close(ours.apply(x.flatten(0, 1)[None])[0], arrays["out"])


def flashvid_inner(params: Params, arrays: Arrays) -> None:
    """What ``fastv`` does, with a count that is rounded up."""
    first, size = params["visual_start"], params["visual_length"]
    hidden = arrays["hidden"]
    paid = arrays["attn"].mean(0)[first : first + size]
    count = torch.tensor([ceil(params["llm_retention_ratio"] * size)])
    kept = kept_of(make("fastv").reduce(one_unit(hidden[first : first + size], prompt_attention=paid), count))
    places = torch.cat([torch.arange(first), kept + first, torch.arange(first + size, len(hidden))])
    same_set(places, arrays["keep"])
    assert torch.equal(places, arrays["position_ids"].long())
    close(hidden[places], arrays["out"])


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("xinyouu/V-CAST", "compressor/v_cast/modeling_qwen3_vl_v_cast.py:_v_cast_compress_frames"): vcast,
    ("xinyouu/V-CAST", "compressor/v_cast/modeling_qwen3_vl_v_cast.py:v_cast_compress_qwen3"): vcast_videos,
    (
        "luminousllsa/ForestPrune",
        "llava/model/llava_arch_forest.py:GraphPruner.gprune, prune_temporal_forest_spatial",
    ): forestprune,
    ("Fanziyang-v/FlashVID", "flashvid/utils.py:flashvid_compression"): flashvid,
    ("Fanziyang-v/FlashVID", "flashvid/utils.py:fastv_prune"): flashvid_inner,
}
