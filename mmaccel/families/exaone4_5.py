"""EXAONE 4.5 and HyperCLOVA X Vision 2: the tower of Qwen2.5-VL, and a language model with plain positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .qwen_vl import Windowed


class Exaone45(Windowed):
    """Queries of the tower share keys; of the language model, layers with a sliding window alone have RoPE, and norms follow
    attention and MLP."""

    name = "exaone4_5"
    model_types = ("exaone4_5",)
    since = "5.23"
    halves = False
    heads_first = True
    tower_names = {"image": "visual", "video": "visual"}

    def norm_in(self, layer: Any) -> nn.Module:
        """Nothing: layers normalise what attention and MLP return."""
        return nn.Identity()


class HyperClovaXVision2(Windowed):
    """The tower of Qwen2.5-VL itself, and a linear layer behind its merger."""

    name = "hyperclovax_vision_v2"
    model_types = ("hyperclovax_vision_v2",)
    since = "5.23"
    tower_names = {"image": "vision_model", "video": "vision_model"}

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[..., V]`` of the last hidden states ``[..., D]``, which the model scales."""
        return super().logits(states) * float(self.text.config.logits_scaling)
