"""Comparators on vectors of other shapes than the shipped ones, made here by short programs written from the papers' rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare_clips import streamdvc_adjacent, streamdvc_kmeans
from compare_drafts import specpc
from compare_layers import framefusion
from compare_merging import moviechat_memory
from compare_patches import pixelprune, stc_cacher
from harness import NotOffered
from test_conformance import comparator_of
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_function_is_found_by_its_name_in_another_file() -> None:
    at = {"repo": "ZichenWen1/DART", "function": "somewhere/else.py:get_retained_image_token"}
    assert comparator_of(at) is comparator_of({**at, "repo": "ZichenWen1/DART-v2"}) is not None
    assert comparator_of({**at, "function": "somewhere/else.py:another_function"}) is None


@pytest.mark.parametrize("wins", ["window", "text"])
def test_tokens_of_the_window_take_their_neighbours_along(wins: str) -> None:
    """SpecPC with one head, layer and step, no pooling, and two neighbours: each token takes the one behind it along."""
    size, window, most = 24, 4, 9
    prefill = random(1, 1, window, size) + (torch.arange(size) >= size - window - 1) * (wins == "window")
    prefill = prefill.tril(size - window)
    prefill = prefill / prefill.sum(-1, keepdim=True)
    score = prefill[0, 0].amax(0)
    taken: list[int] = []
    for place in score.argsort(descending=True).tolist()[:most]:
        taken += [near for near in (place, min(place + 1, size - 1)) if near not in taken]
    behind = list(range(size - window, size))
    kept = sorted((behind + [one for one in taken if one not in behind])[:most])
    params: dict[str, Any] = {
        "max_capacity_prompt": most,
        "window_size": window,
        "kernel_size": 1,
        "pool_type": "max",
        "reduction_type": "max",
        "neighbor_tokens": 2,
        "starting_layer_index": 0,
        "weighted_query": False,
        "lookahead_tokens": 1,
    }
    vector = {"prefill": prefill, "aggregated": score[None], "kept": torch.tensor([kept])}
    specpc(params, vector)
    wrong = next(one for one in range(size) if one not in kept)
    with pytest.raises(AssertionError):
        specpc(params, {**vector, "kept": torch.tensor([sorted([*kept[1:], wrong])])})


def test_a_memory_of_two_frames() -> None:
    places, frames, width = 3, 4, 5
    vector = {f"frame{i}": random(places, width, seed=i) for i in range(frames)}
    memory, weight = torch.cat([vector["frame0"], vector["frame1"]]), torch.ones(2 * places)
    for i in range(2, frames):
        data, heavy = torch.cat([memory, vector[f"frame{i}"]]), torch.cat([weight, torch.ones(places)])
        for _ in range(2):
            home = torch.cdist(data, memory).argmin(1)
            weight = torch.zeros(2 * places).index_add_(0, home, heavy)
            memory = torch.zeros_like(memory).index_add_(0, home, data * heavy[:, None]) / weight[:, None]
        vector |= {f"mem{i}": memory, f"w{i}": weight}
    params = {"memory_tokens": 2 * places, "iterations": 2, "tokens_per_frame": places, "frames": frames}
    streamdvc_kmeans(params, vector)
    with pytest.raises(AssertionError):
        streamdvc_kmeans(params, {**vector, "mem3": vector["mem3"] + 0.1})


@pytest.mark.parametrize("merge", [1, 3])
@pytest.mark.parametrize("anchored", [False, True])
def test_patches_of_other_sizes_and_neighbours_as_they_are(merge: int, anchored: bool) -> None:
    high, wide, width, threshold = 4, 5, 6, 0.12
    colours = (random(high, wide, width, seed=merge) * 0.2).repeat_interleave(merge**2, 2)
    seen, kept = colours.clone(), []

    def like(a: Tensor, b: Tensor) -> bool:
        return float((a - b).abs().max()) <= threshold

    for y in range(high):
        for x in range(wide):
            of = seen if anchored else colours
            left, above = of[y, x - 1], of[y - 1, x]
            up = y > 0 and (x == 0 or (like(of[y - 1, x - 1], left) and not like(of[y - 1, x - 1], above)))
            guess = above if up else left
            if (x or y) and like(colours[y, x], guess):
                seen[y, x] = guess
            else:
                kept.append(y * wide + x)
    # the vector's pixels are [0, 1] colours, a row a patch; the adapter of the family divides them anew
    pixels = colours.view(high * wide * merge**2, width)
    vector = {
        "pixel_values": pixels - 0.25,
        "image_grid_thw": torch.tensor([[1, high * merge, wide * merge]]),
        "kept0": torch.tensor(kept),
        "patches0": torch.tensor([merge**2 * one + i for one in kept for i in range(merge**2)]),
    }
    params = {"method": "pred_2d", "metric": "max", "threshold": threshold, "spatial_merge_size": merge}
    pixelprune({**params, "anchored": anchored}, vector)
    with pytest.raises(AssertionError):
        pixelprune({**params, "anchored": anchored}, {**vector, "kept0": vector["kept0"][:-1]})


def test_the_attention_of_all_steps_may_be_given() -> None:
    """FrameFusion: a step that merges looks at no attention, whether the vector holds some or not."""
    hidden = random(1, 12, 4) + 1.0
    params = {
        "cost": 0.3,
        "similarity_lower_bound": 0.99999,
        "ratio_lower_bound": 0.1,
        "num_layers": 28,
        "steps": [{"sparsity_list": [0.0]}],
    }
    vector = {"hidden0": hidden, "patch_type": torch.arange(12)[None] % 6, "attn_rows": random(1, 1, 12)}
    vector |= {"pos1": torch.arange(12), "out1": hidden}
    framefusion(params, vector)


@pytest.mark.parametrize(
    ("compare", "params", "arrays"),
    [
        (streamdvc_adjacent, {"weighted": False}, {}),
        (streamdvc_kmeans, {"memory_tokens": 2, "tokens_per_frame": 2, "no_momentum_in_memory": True}, {}),
        (stc_cacher, {"calls": 1, "update_token_ratio": 0.5, "cache_interval": 2}, {"x0": torch.zeros(2, 4, 3)}),
        (
            moviechat_memory,
            {"n_frame": 4, "short_memory_length": 4, "short_memory_merge": 2},
            {f"frag{i}": torch.zeros(n, 2, 3) for i, n in enumerate((4, 3, 4))},
        ),
    ],
)
def test_what_is_not_offered_is_said(compare: Any, params: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    with pytest.raises(NotOffered):
        compare(params, arrays)
