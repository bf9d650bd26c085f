"""Qwen3.5 and 3.6, dense and with experts: most layers of the language model keep a recurrent state, and no keys."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layout import Picture, Tile
from .base import Call, Description, Facts, Wrapper
from .qwen_vl import Qwen2VL


class Qwen35(Qwen2VL):
    """Three of four layers are gated delta nets: a short convolution and a recurrent state, which a token passes on its way.
    What is dropped before such a layer has never been there for it; what is dropped behind it stays in its state. Prompts are
    those of Qwen3-VL, without DeepStack; RoPE turns a quarter of each head.
    """

    name = "qwen3_5"
    model_types = ("qwen3_5",)
    place = 8
    facts = Facts("yes, any size", cls=False, merging="2x2 blocks")
    stateful = True
    halves = False

    def __init__(self, model: nn.Module | Description, processor: Any = None) -> None:
        super().__init__(model, processor)
        self.halves = False

    def clip(self, t: int, h: int, w: int, offset: int) -> Picture:
        """One segment a frame, as there are time stamps between them."""
        return [Tile.raster(1, h, w, offset + f * h * w, frame=f) for f in range(t)]

    @cached_property
    def recurrent(self) -> tuple[int, ...]:  # type: ignore[override]
        """The gated delta nets."""
        kinds = self.config.text_config.layer_types
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")

    @cached_property
    def attending(self) -> tuple[int, ...]:  # type: ignore[override]
        """The others."""
        return tuple(layer for layer in range(self.depth) if layer not in self.recurrent)

    def stored_from(self, layer: int) -> int:
        """As many as there are layers with attention below."""
        return bisect.bisect_left(self.attending, layer)

    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """Also rows that go on with different numbers of tokens: padding behind other tokens changes a recurrent state, mask or
        no mask."""
        nets = [self.text.layers[layer].linear_attn for layer in self.recurrent]
        return [*super().wrappers(), *((net, "forward", functools.partial(_row_by_row, net.layer_idx)) for net in nets)]

    def mask_argument(self, real: Tensor | None) -> dict[str, Tensor | None]:
        """The gated delta nets let padding through unless they are told of it."""
        return {"full_attention": None, "linear_attention": real}


def _row_by_row(
    number: int, original: Callable[..., Tensor], current: Callable[[], Call | None]
) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(
        hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        call, layer = current(), None if cache_params is None else cache_params.layers[number]
        if call is None or attention_mask is None or not getattr(layer, "begun", False):
            return original(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        assert layer is not None
        out = torch.zeros_like(hidden_states)
        for row, real in enumerate(attention_mask.bool().cpu()):
            if bool(real.any()):
                there = real.to(hidden_states.device)
                with layer.of_row(row):
                    out[row, there] = original(hidden_states[row, there][None], cache_params=cache_params, **kwargs)[0]
        return out

    return forward


class Qwen35Moe(Qwen35):
    """The same with experts in every layer of the language model."""

    name = "qwen3_5_moe"
    model_types = ("qwen3_5_moe",)
