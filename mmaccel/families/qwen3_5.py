"""Qwen3.5 and 3.6, dense and with experts: most layers of the language model keep a recurrent state, and no keys."""

from __future__ import annotations

from .qwen_vl import Qwen2VL
from .stateful import Stateful


class Qwen35(Stateful, Qwen2VL):
    """Three of four layers are gated delta nets, a short convolution and a recurrent state (see :class:`.stateful.Stateful`).
    Prompts are those of Qwen3-VL, without DeepStack; RoPE turns a quarter of each head."""

    name = "qwen3_5"
    model_types = ("qwen3_5",)
    place = 8
    carrying = ("linear_attention",)
    halves = False
    stamped = True


class Qwen35Moe(Qwen35):
    """The same with experts in every layer of the language model."""

    name = "qwen3_5_moe"
    model_types = ("qwen3_5_moe",)
