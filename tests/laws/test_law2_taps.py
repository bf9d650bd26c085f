"""What hiding takes for granted: methods that ask the tower choose by the tower's own attention, place by place."""

from __future__ import annotations

import functools

import oracle
import pytest
import torch
import zoo
from laws.helpers import PACKED, has_block, joined
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.vision_utils import get_vision_window_index

pytestmark = pytest.mark.usefixtures("no_gradients")


def _watch(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
    weight = (query @ key.transpose(-1, -2) * scaling).softmax(-1)
    module.weights.append(weight)
    return (weight @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("laws_watch", _watch)
AttentionMaskInterface.register("laws_watch", lambda *args, **kwargs: None)


@functools.cache
def watched(family: str):
    model = zoo.model(family)
    model.set_attn_implementation({"vision_config": "laws_watch"})
    return model


def attention(family: str, feed, layer: int) -> list[Tensor]:
    """The attention maps `[N, H, T, T]` of one tower layer in a run of the bare model."""
    model = watched(family)
    layers = oracle.layers_of_tower(model)[0][0]
    modules = [next(m for n, m in block.named_modules() if n in ("self_attn", "attention", "attn")) for block in layers]
    for module in modules:
        module.weights = []
    model(**feed)
    return modules[layer].weights


def blocks(scores: Tensor, side: int) -> Tensor:
    """Means of 2 x 2 patches in rows of `side`, `[N, patches] -> [N, patches / 4]`."""
    return scores.reshape(len(scores), -1, 2, side // 2, 2).mean((2, 4)).flatten(1)


def received(family: str, feed) -> Tensor:
    """Attention every token receives, `[segments, tokens]`, mapped by hand."""
    layer = {"llava": 2, "video_llava": 2}.get(family, 3)
    maps = [w.mean((1, 2)) for w in attention(family, feed, layer)]
    if family in PACKED:
        merged = torch.cat(maps, dim=1)[0, joined(family, feed["image_grid_thw"])].mean(1)
        vision = watched(family).config.vision_config
        if hasattr(vision, "window_size"):
            sizes = vision.spatial_merge_size, vision.window_size, vision.patch_size
            merged = merged[get_vision_window_index(feed["image_grid_thw"], *sizes)[0].argsort()]
        return merged[None]
    if family in ("llava", "video_llava"):
        return torch.cat(maps)[:, 1:]
    if family == "pixtral":
        return torch.cat(maps)
    if family == "internvl":
        return blocks(torch.cat(maps)[:, 1:], 8)
    return blocks(torch.cat(maps), {"ovis2": 8, "mistral3": 16, "mistral_large4": 16, "lighton_ocr": 16}.get(family, 6))


def is_top(family: str, feed, name: str, scores: Tensor) -> None:
    got = oracle.record(family, feed, oracle.recipe(name, family), oracle.force(family, 1))
    kept = got.kept[0, oracle.visual(family, feed)[0]][has_block(family, feed)].reshape(scores.shape)
    for mine, score in zip(kept, scores, strict=True):
        assert 0 < int(mine.sum()) < len(mine)
        assert torch.equal(mine.nonzero()[:, 0], score.topk(int(mine.sum())).indices.sort().values)


@pytest.mark.parametrize(
    "family", ("llava", "video_llava", *PACKED, *oracle.ONE_CALL, "internvl", "smolvlm", "idefics3", "ovis2")
)
def test_attention_received_is_the_towers(family):
    feed = zoo.inputs(family)
    is_top(family, feed, "attention-received", received(family, feed))


@pytest.mark.parametrize("family", ("llava", "video_llava", "internvl"))
def test_attention_of_the_cls_token_is_the_towers(family):
    feed = zoo.inputs(family)
    scores = torch.cat(attention(family, feed, 3 if family == "internvl" else 2))[:, :, 0, 1:].mean(1)
    is_top(family, feed, "vtc-cls", blocks(scores, 8) if family == "internvl" else scores)
