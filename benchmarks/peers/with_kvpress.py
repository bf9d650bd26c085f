"""kvpress, the library of KV cache compression that runs on text models. Run by :mod:`compare`, in an environment of its own.

https://github.com/NVIDIA/kvpress
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from worker import Side, serve

#: per policy the press for a compression ratio
PRESSES: dict[str, Callable[[float], Any]] = {
    "streaming-llm": lambda ratio: StreamingLLMPress(ratio, n_sink=4),
    "knorm": KnormPress,
    "keydiff": KeyDiffPress,
    "lagkv": lambda ratio: LagKVPress(ratio, n_sink=4, lag_size=32),
    "tova": TOVAPress,
    "snapkv": lambda ratio: SnapKVPress(ratio, window_size=32, kernel_size=5),
    "pyramidkv": lambda ratio: PyramidKVPress(ratio, window_size=8, kernel_size=5, beta=10),
    "adakv": lambda ratio: AdaKVPress(SnapKVPress(ratio, window_size=32, kernel_size=5), alpha_safeguard=0.2),
    "observed-attention": ObservedAttentionPress,
}


class Kvpress(Side):
    """Presses on the text model alone, which reads the embeddings of the whole prompt."""

    packages = ("kvpress", "torch", "transformers")

    def load(self, folder: Path) -> None:
        """The text model and its prompt."""
        self.model = AutoModelForCausalLM.from_pretrained(folder / "text", dtype=torch.float32).eval()
        self.text = self.model.model
        self.inputs = load_file(folder / "text.safetensors")

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Eager attention for the press that reads attention maps."""
        self.model.set_attn_implementation("eager" if name == "observed-attention" else "sdpa")
        try:
            yield
        finally:
            self.model.set_attn_implementation("sdpa")

    @contextmanager
    def policy(self, name: str, kept: int, tokens: int, noting: bool) -> Iterator[None]:
        """The model under a press."""
        # a hair more than the share: the number that stays is truncated
        press = PRESSES[name](1 - (kept + 0.01) / tokens)
        for layer in self.text.layers:
            layer.self_attn.masked_key_indices = None  # a head-wise press leaves them, and they would go on hiding keys
        scorer = getattr(press, "press", press)
        score, self.scores = scorer.score, []

        def noted(*args: Any, **kwargs: Any) -> Tensor:
            found = score(*args, **kwargs)
            self.scores.append(found[0].tolist())
            return found

        if noting:
            scorer.score = noted
        with self.attention(name), press(self.model):
            yield

    def positions(self, name: str, cache: DynamicCache) -> list[list[list[int]]]:
        """Found by their keys, which are to the bit those of a bare run; head-wise presses note what they mask."""
        masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in self.text.layers]
        full = DynamicCache(config=self.model.config)
        with self.attention(name), torch.inference_mode():
            self.text(**self.inputs, past_key_values=full)
        out = []
        for some, whole, masked in zip(cache.layers, full.layers, masks, strict=True):
            heads = []
            for kept, known in zip(some.keys[0], whole.keys[0], strict=True):
                place = {key.numpy().tobytes(): i for i, key in enumerate(known)}
                heads.append(sorted(place[key.numpy().tobytes()] for key in kept))
            if masked is not None and name != "bare":
                gone = set(zip(masked[1].tolist(), masked[2].tolist(), strict=True))
                heads = [[i for i in places if (head, i) not in gone] for head, places in enumerate(heads)]
            out.append(heads)
        return out

    def held(self, cache: DynamicCache) -> int:
        """Bytes of keys and values."""
        tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


if __name__ == "__main__":
    serve(Kvpress())
