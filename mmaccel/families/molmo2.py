"""Molmo 2: a picture whole and in crops that overlap, and frames of clips; all pictures of a prompt attend to all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.layout import Modality, Picture
from .base import BothWays, Facts, consecutive
from .tower import EncoderCall


class Molmo2(BothWays):
    """A picture is two tiles, the small one whole and the other joined of its crops. The marks around pictures and behind rows
    are text, and with the tokens of all pictures of a prompt they attend both ways.
    """

    name = "molmo2"
    model_types = ("molmo2",)
    place = 15
    facts = Facts("yes, tiled", cls=False, merging="-")
    since = "5.23"
    modalities = ("image", "video")
    extra_inputs = ("mm_token_type_ids",)
    mutual_type = 1
    closed = "cuts pictures into crops that overlap"
    layers_path = ""

    def __init__(self, model: Any, processor: Any = None) -> None:
        super().__init__(model, processor)
        # RoPE is stretched in some layers of some models
        self.halves = self.halves and len(set(self._stretched)) == 1

    @property
    def _stretched(self) -> list[bool]:
        """Whether the RoPE of each layer of the language model is stretched."""
        text = self.config.text_config
        return [layer in text.rope_scaling_layers for layer in range(text.num_hidden_layers)]

    def rope_kind(self, layer: int) -> str:
        return str(self._stretched[layer])

    def norm_in(self, layer: Any) -> nn.Module:
        """The norm, or an identity in models that have it behind the attention."""
        return nn.Identity() if layer.norm_after else super().norm_in(layer)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        given = torch.as_tensor(encoded.arguments[f"{modality}_grids"]).tolist()
        if modality == "image":
            return consecutive([[(1, h, w), (1, rows, columns)] for h, w, rows, columns in given])
        return consecutive([[(1, h, w)] * frames for frames, h, w in given], clips=True)
