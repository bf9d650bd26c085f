"""Patches that are left out of the tower, and frames that reuse parts of others, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparators import Arrays, Params, close
from harness import NotOffered, make
from torch import Tensor, nn

from mmaccel.families.base import Description
from mmaccel.families.qwen_vl import Qwen3VL
from mmaccel.families.tower import EncoderCall
from mmaccel.runtime.tower.frame_reuse import Frames, LayerParts, reuse_layer


def pixelprune(params: Params, arrays: Arrays) -> None:
    """Pictures through the adapter of the family that the program is for, which cuts them into blocks."""
    options = {"anchored": params["anchored"]} if "anchored" in params else {}
    # the program's "exact" is the largest difference at a threshold of zero
    metric = {"exact": "max"}.get(params["metric"], params["metric"])
    threshold = 0.0 if params["metric"] == "exact" else params["threshold"]
    method = make("pixelprune", scan=params["method"], metric=metric, threshold=threshold, **options)
    family = Qwen3VL(Description(_Config(params["spatial_merge_size"])))
    first = 0
    for number, grid in enumerate(arrays["image_grid_thw"]):
        pixels = arrays["pixel_values"][first : first + int(grid.prod())]
        first += len(pixels)
        # the vector has colours as they are, which the adapter takes for divided ones
        [(values, places)] = family.unit_pixels(EncoderCall({"image_grid_thw": grid[None]}), 2 * pixels)
        source = method.predict(values)
        kept = source == torch.arange(source.shape[1])
        assert torch.equal(kept.flatten().nonzero()[:, 0], arrays[f"kept{number}"])
        assert torch.equal(places[kept].flatten(), arrays[f"patches{number}"])


def stc_cacher(params: Params, arrays: Arrays) -> None:
    """One layer; frames of a clip are the program's chunks of one frame."""
    method = make("stc-cacher", share=params["update_token_ratio"], interval=params["cache_interval"])
    if any(len(arrays[f"x{call}"]) != 1 for call in range(params["calls"])):
        raise NotOffered("chunks of several frames; stc-cacher recomputes frame by frame")
    hidden = torch.cat([arrays[f"x{frame}"] for frame in range(params["calls"])])
    layer = _Layer(arrays, params["heads"])
    parts, total = LayerParts(FAMILY, layer), hidden.shape[1]
    frames = Frames.of(method, [[total] * len(hidden)], hidden.device)
    assert frames is not None
    fresh, made = reuse_layer(method, parts, layer, frames, hidden, {})
    for frame, one in enumerate(made):
        close(one[None], arrays[f"y{frame}"])
    before, after = (parts.project(parts.first_norm(arrays[name]), 1) for name in ("x0", "x1"))
    assert torch.equal(method.recompute(after, before), arrays["update1"].sort().values)
    assert fresh == 2 * total + arrays["update1"].numel()


class _Attention(nn.Module):
    def __init__(self, arrays: Arrays, heads: int) -> None:
        super().__init__()
        self.num_heads, width = heads, len(arrays["wq"])
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.qkv.weight.data = torch.cat([arrays["wq"], arrays["wk"], arrays["wv"]])
        self.proj.weight.data = arrays["wo"]

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(split[0], split[1], split[2])
        return self.proj(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """The stand-in of the vector, named as in Qwen's towers."""

    def __init__(self, arrays: Arrays, heads: int) -> None:
        super().__init__()
        width = len(arrays["wm"])
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        linear = nn.Linear(width, width, bias=False)
        linear.weight.data = arrays["wm"]
        self.attn, self.mlp = _Attention(arrays, heads), nn.Sequential(linear, nn.GELU())

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))  # type: ignore[no-any-return]


class _Config:
    """What the adapter asks of Qwen3-VL's configuration."""

    deepstack_visual_indexes, model_type = (), "qwen3_vl"

    def __init__(self, merge: int = 2) -> None:
        self.spatial_merge_size, self.vision_config, self.text_config = merge, self, self


FAMILY = Qwen3VL(Description(_Config()))
COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    (
        "OPPO-Mente-Lab/PixelPrune",
        "pixelprune/core.py:compute_merged_keep_indices, merged_indices_to_patch_indices",
    ): pixelprune,
    ("lern-to-write/STC", "model/custom_siglip.py:forward_with_selective_key_recompute"): stc_cacher,
}
