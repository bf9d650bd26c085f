"""Positions of prompts with three axes, of what follows them, and of keys that close their gaps, against others' numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import zoo
from comparators import Arrays, Params, close
from compare_recall import rotated
from harness import CacheRun, make, receiving, run
from torch import Tensor

from mmaccel import Recipe, Stage, accelerated
from mmaccel.families import family_of
from mmaccel.families.base import Continued
from mmaccel.runtime.cache.close_gaps import CloseGaps
from mmaccel.runtime.cache.dual_chunk import ReadChunks
from mmaccel.runtime.call.runs import TextInputs

#: what a patch of the tiny models has: colours, frames, rows and columns
PATCH = 3 * 2 * 8 * 8


def mrope(params: Params, arrays: Arrays) -> None:
    """What the model is asked for a prompt, and where it goes on when half of the visual tokens were dropped."""
    rate = params["tokens_per_second"]
    model = zoo.model("qwen2_vl" if rate is None else "qwen2_5_vl")
    family, config = family_of(model), model.config
    assert config.vision_config.spatial_merge_size == params["merge"]
    if rate is not None:
        config.vision_config.tokens_per_second = rate
    types = arrays["in_token_type"][None]
    # the last of the vocabulary is no mark
    word = config.get_text_config().vocab_size - 1
    ids = torch.where(types == 2, config.video_token_id, torch.where(types == 1, config.image_token_id, word))
    feed: dict[str, Tensor] = {}
    for kind, name, pixels in (
        ("i", "image_grid_thw", "pixel_values"),
        ("v", "video_grid_thw", "pixel_values_videos"),
    ):
        grids = [grid for grid, one in zip(params["grids"], params["kinds"], strict=True) if one == kind]
        if grids:
            feed[name] = torch.tensor(grids)
            random = torch.Generator().manual_seed(0)
            feed[pixels] = torch.randn(int(feed[name].prod(1).sum()), PATCH, generator=random)
    if params["second_per_grid_ts"] is not None:
        feed["second_per_grid_ts"] = torch.tensor(params["second_per_grid_ts"])
    sizes = {name: x for name, x in feed.items() if not name.startswith("pixel")}
    mask = torch.ones_like(ids)
    assert torch.equal(run("new_positions", family, ids, types, mask, sizes)[:, 0], arrays["out_positions"])
    count, length = params["generated"], ids.shape[1]
    words = torch.full((1, count), word)
    longer = [torch.cat([ids, words], 1), torch.cat([types, torch.zeros_like(words)], 1)]
    appended = run("new_positions", family, *longer, torch.ones_like(longer[0]), sizes)
    assert torch.equal(appended[:, 0, length:], arrays["out_appended_text"])
    asked: list[Tensor] = []
    with torch.no_grad(), accelerated(model, Recipe("half", (Stage("uniform", 0.5),))):
        cache = model(input_ids=ids, mm_token_type_ids=types, **feed, use_cache=True).past_key_values
        hook = family.text.register_forward_pre_hook(
            lambda module, args, kwargs: asked.append(kwargs["position_ids"]), with_kwargs=True
        )
        model(input_ids=words, past_key_values=cache, use_cache=True)
        hook.remove()
    assert (asked[0][-3:, 0] == arrays["out_generated"]).all()
    delta = int(arrays["out_delta"])
    behind = run("next_positions", Continued(length, torch.tensor([-delta]), None), count)
    assert torch.equal(behind[0, 0], arrays["out_generated"])


class Turning(torch.nn.Module):
    """RoPE of the vector, as transformers' text models have it."""

    def __init__(self, base: float, width: int) -> None:
        super().__init__()
        self.attention_scaling, self.base, self.width = 1.0, base, width

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, n, D]``."""
        one = torch.cat([torch.ones(self.width // 2), torch.zeros(self.width // 2)])
        both = torch.stack([rotated(one.expand(1, positions.shape[1], -1), row, self.base)[0] for row in positions])
        cos, sin = both.chunk(2, dim=-1)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def turning(base: float, width: int) -> Any:
    """A text model that has this RoPE, and nothing else."""
    return SimpleNamespace(rotary_emb=Turning(base, width), config=SimpleNamespace(rope_parameters={}), layers=[])


def rerotate(params: Params, arrays: Arrays) -> None:
    """A prompt of which a policy keeps these positions."""
    keys, kept = arrays["in_k"], arrays["in_positions"]
    rows, _, total, width = keys.shape
    figures = torch.zeros(keys.shape[:3]).scatter_(2, kept, 1.0)
    policy = receiving("h2o", [figures], close_gaps=True)
    text = turning(params["rope_theta"], width)
    cache = CacheRun(policy, kept.shape[2], text=text)
    cache.begin(total, rows)
    gaps = CloseGaps(cache.forward, cache.state)
    gaps.before_text(TextInputs({"position_ids": torch.arange(total).expand(rows, -1)}))
    cache.feed(keys, keys, torch.zeros_like(keys))
    gaps.finish()
    close(cache.state.layers[0].stored()[0], arrays["out_k"])


def dca(params: Params, arrays: Arrays) -> None:
    """A prompt, and of ``decode`` its last token alone; the second row has other values."""
    q, k, v = (arrays[name] for name in ("in_q", "in_k", "in_v"))
    total, width = q.shape[1:]
    policy = make("dca", chunk_size=params["chunk_size"], local_window=params["local_window"])
    size, step = policy.sizes(None)
    assert (size, step) == (params["chunk_size"], params["chunk_len"])
    text = turning(params["rope_base"], width)
    cache = CacheRun(policy, 1.0, text=text)
    cache.begin(total)
    given = TextInputs({"position_ids": torch.arange(total)[None]})
    ReadChunks(cache.forward, policy, cache.state, None).before_text(given)
    inside = given.arguments["position_ids"][0]
    query, key = (rotated(x, inside, params["rope_base"]) for x in (q, k))
    close(key, arrays["out_k_cache"])
    places = torch.arange(total)
    if params["decode"]:
        query, places = query[:, -1:], places[-1:]
    at, came = places.expand(2, -1), torch.arange(total).expand(2, 1, -1)
    visible = (came[:, :, None] <= at[:, None, :, None])[:, :1]
    states = [torch.stack([x, other]) for x, other in ((query, query), (key, key), (v, -v))]
    rounded = not params["decode"]
    read = run("dual_chunk_attention", text, *states, at, came, visible, width**-0.5, (size, step), rounded)
    torch.testing.assert_close(read[0].flatten(1), arrays["out_attn"], rtol=1e-4, atol=1e-5)


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("huggingface/transformers (PyPI)", "get_rope_index"): mrope,
    ("HKUNLP/ChunkLlama", "forward, ChunkLlamaRotaryEmbedding"): dca,
    ("NVIDIA/kvpress", "KeyRerotationPress.rerotate_keys"): rerotate,
}
