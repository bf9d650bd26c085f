"""North Micro Vision: the tower and positions of Qwen3-VL, and a language model of Cohere with windows."""

from __future__ import annotations

from torch import Tensor

from .qwen_vl import Qwen3VL


class CohereCompass(Qwen3VL):
    """Attention and MLP of a layer of the language model read the same input. RoPE differs between kinds of layers, one of
    which may have none."""

    name = "cohere_compass"
    model_types = ("cohere_compass",)
    since = "5.24"
    halves = False
    no_return = "has layers of two RoPEs"

    def rope_kind(self, layer: int) -> str:
        """Layers with windows and those without have RoPEs of their own."""
        return str(self.text.config.layer_types[layer])

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[..., V]`` of the last hidden states ``[..., D]``, which the model scales."""
        scale = self.text.config.logit_scale
        return super().logits(states) * (1.0 if scale is None else float(scale))
