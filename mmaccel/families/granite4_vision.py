"""Granite 4 Vision: tiles as LLaVA-NeXT, shrunk by window Q-Formers; the features of every one of them go to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Modality
from .base import JOINED, Facts, resampled
from .llava_next import LlavaNext
from .tower import EncoderCall


class Granite4Vision(LlavaNext):
    """Visual tokens are zero where they enter; DeepStack adds features of several tower layers before layers of the language
    model, and taps are those of the last tower layer that is read."""

    name = "granite4_vision"
    model_types = ("granite4_vision",)
    place = 17
    facts = Facts("yes, tiled", clips=False, cls=False, merging="-")
    whole = JOINED

    def __init__(self, model: Any, processor: Any = None) -> None:
        super().__init__(model, processor)
        # added before the layer that is named, where tokens may be dropped again
        self.deepstack = max(self.layers_added)

    @property
    def layers_added(self) -> list[int]:
        """The layers of the language model before which features are added, in the order of the call's."""
        maps = [layer for _, layer in self.config.deepstack_layer_map]
        return list(dict.fromkeys([*maps, *self.config.spatial_target_layers]))

    @property
    def read_layers(self) -> list[int]:
        return [layer for layer, _ in self.config.deepstack_layer_map] + [self.config.spatial_vision_layer]

    @property
    def cells(self) -> int:
        """Tokens along one side of a tile."""
        return int(self.side * Fraction(self.config.downsample_rate))

    def features(self, output: Any) -> list[Tensor]:
        """Features for the first layer; those for other layers have as many tokens."""
        return list(output.deepstack_features[0][1])

    def deep_features(self, kwargs: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]] | None:
        features = kwargs.get("deepstack_features")
        return None if features is None else (kwargs["vision_mask"][..., 0], list(features.values()))

    def deep_arguments(self, visual: Tensor, features: list[Tensor]) -> dict[str, Any]:
        layers = dict(zip(self.layers_added, features, strict=True))
        return {"vision_mask": visual[..., None], "deepstack_features": layers}

    def entering(self, embeds: Tensor, deep: list[Tensor]) -> Tensor:
        """Embeddings with the features of the first layer that has any; without them all visual tokens are equal."""
        first = min(range(len(deep)), key=self.layers_added.__getitem__)
        return embeds * self.text.embedding_multiplier + deep[first].to(embeds)

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = super().logits(states) / self.config.text_config.logits_scaling
        return logits

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """Mean of the patches of each token."""
        return resampled(torch.cat(values), self.side, self.cells, "area")
