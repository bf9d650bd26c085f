"""mmaccel itself, as one side of a comparison. Run by :mod:`compare`, in the environment that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration
from worker import Side, serve

from mmaccel import accelerated
from mmaccel.kv.cache import cache_bytes, state_of
from mmaccel.recipe import Recipe, Stage

#: per policy its method and options; text and pictures share one budget, since the peers know no pictures
POLICIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "streaming-llm": ("streaming-llm", {"sinks": 4}),
    "knorm": ("knorm", {}),
    "keydiff": ("keydiff", {}),
    "lagkv": ("lagkv", {"sinks": 4, "lag": 32}),
    "tova": ("tova", {}),
    "snapkv": ("snapkv", {"window": 32, "kernel": 5}),
    "pyramidkv": ("snapkv", {"window": 8, "kernel": 5, "layer_budget": "pyramid:10"}),
    "adakv": ("snapkv", {"window": 32, "kernel": 5, "head_budget": "safeguard:0.2"}),
    "observed-attention": ("observed-attention", {}),
}


class Mmaccel(Side):
    """Recipes on the whole model, which sees the picture."""

    packages = ("mmaccel", "torch", "transformers")

    def load(self, folder: Path) -> None:
        """The model and its prompt."""
        self.model = LlavaForConditionalGeneration.from_pretrained(folder / "llava", dtype=torch.float32).eval()
        self.text = self.model.model.language_model
        self.inputs = load_file(folder / "llava.safetensors")

    def policy(self, name: str, kept: int, tokens: int, noting: bool) -> AbstractContextManager[Any]:
        """The model under a recipe of one policy."""
        method, options = POLICIES[name]
        return accelerated(self.model, Recipe(name, (Stage(method, kept, {**options, "joint": True}),)))

    def positions(self, name: str, cache: Any) -> list[list[list[int]]]:
        """As the cache tells them."""
        state = state_of(cache)
        if state is None:
            return [[list(range(layer.keys.shape[2]))] * layer.keys.shape[1] for layer in cache.layers]
        out = []
        for layer in state.layers:
            assert layer.index is not None
            index = layer.index.by_head[0].expand(layer.keys.shape[1], -1)
            out.append([sorted(i for i in head.tolist() if i >= 0) for head in index])
        return out

    def held(self, cache: Any) -> int:
        """Everything the cache holds, its indices included."""
        return cache_bytes(cache)


if __name__ == "__main__":
    serve(Mmaccel())
