"""What taps and merging must know of vision towers: families and image encoders that stand alone tell it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layout import Modality


@dataclass
class EncoderCall:
    """What one call of ``get_image_features`` or ``get_video_features`` was given.

    arguments : the call's bound arguments.
    tokens : language model tokens that came out; 0 as long as it runs.
    """

    arguments: dict[str, Any]
    tokens: int = 0


class Towers(ABC):
    """The vision towers of one model, right for towers that run over ``[tiles, tokens, width]``."""

    name: str
    #: why methods cannot look into its layers, as the end of "the vision tower of ... "; None where they can
    closed: str | None = None
    #: why tokens cannot merge between its layers; None where they can
    whole: str | None = None

    @property
    @abstractmethod
    def has_cls(self) -> bool:
        """Whether the tower puts a CLS token in front of the patches."""

    @abstractmethod
    def towers(self) -> list[Any]:
        """The distinct vision towers."""

    @abstractmethod
    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """The tower's transformer layers, in order."""

    @abstractmethod
    def attention_of(self, layer: Any) -> nn.Module:
        """The self-attention of a tower layer."""

    @property
    @abstractmethod
    def feature_layer(self) -> int:
        """The tower layer (counted from 0) whose output is read."""

    @abstractmethod
    def tap_layer(self, layer: float | None) -> int:
        """The tower layer a tap means, see :class:`mmaccel.method.Tap`."""

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """What a tap delivered, one value per language model token: ``[tokens, ...]`` in source order.

        ``values`` are the tapped tensors ``[tiles, patches, ...]`` of the tower's attention calls, CLS removed.
        """
        return torch.cat(values).flatten(0, 1)

    # --- merging ----------------------------------------------------------------------------------------------
    def merging_layers(self) -> list[int]:
        """The layers in which tokens are merged."""
        return list(range(self.feature_layer + 1))

    def units(self, encoded: EncoderCall, patches: int) -> Tensor:
        """``[units, u]`` long: the patches that the projector joins into one token; they merge as one. Those of a tile, or
        those of all frames, one behind the other, where the tower packs them into one sequence of ``patches``."""
        return torch.arange(patches)[:, None]

    def frames(self, encoded: EncoderCall) -> list[list[int]] | None:
        """Patches of every frame of every picture of a tower that packs them into one sequence; None for other towers."""
        return None

    def readers(self, tower: Any) -> list[nn.Module]:
        """Modules that read the tokens between layers, and need the full grid."""
        return []

    def first_norm(self, layer: nn.Module) -> nn.Module:
        """The norm before the attention of a pre-norm layer."""
        norms = ("layer_norm1", "layernorm_before", "norm1", "ln_1")
        found: nn.Module = next(getattr(layer, name) for name in norms if hasattr(layer, name))
        return found

    def second_half(self, layer: nn.Module) -> tuple[nn.Module, nn.Module]:
        """The norm before the MLP of a pre-norm layer, whose input is the sum behind the attention, and the MLP."""
        norms = ("layer_norm2", "layernorm_after", "norm2", "ln_2")
        return next(getattr(layer, name) for name in norms if hasattr(layer, name)), layer.get_submodule("mlp")
