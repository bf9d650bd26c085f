"""LLaVA 1.5 and VipLLaVA: one square image, CLIP tower, every patch a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.layout import Modality, Picture, Tile
from ..errors import UnsupportedError
from .base import JOINED, Facts, Family, consecutive
from .pixtral import Pixtral
from .tower import EncoderCall


class Llava(Family):
    """``n * n`` tokens an image, raster order; with the select strategy ``full`` the CLS token comes first."""

    name = "llava"
    model_types = ("llava",)
    place = 1
    facts = Facts(clips=False)

    def __init__(self, model: object, processor: object = None) -> None:
        super().__init__(model, processor)  # type: ignore[arg-type]
        if self.vision.model_type not in ("clip_vision_model", "siglip_vision_model"):
            raise UnsupportedError(
                f"LLaVA with a {self.vision.model_type} tower is not supported; CLIP, SigLIP and Pixtral towers are."
            )

    @classmethod
    def of(cls, config: Any) -> type[Family]:
        """Pixtral has another tower, and is a family of its own."""
        return Pixtral if config.vision_config.model_type == "pixtral" else cls

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        # VipLLaVA has no choice of strategy
        strategy = getattr(self.config, "vision_feature_select_strategy", "default")
        leading = int(self.has_cls and strategy == "full")
        size = 1, self.side, self.side
        plain = consecutive([[size]] * (encoded.tokens // (self.side**2 + leading)))
        return [[with_cls(tile, leading)] for [tile] in plain]


class VipLlava(Llava):
    """As LLaVA; features of several layers of the tower are joined, and taps are those of the last of them."""

    name = "vipllava"
    model_types = ("vipllava",)
    facts = Facts(clips=False, merging="-")
    whole = JOINED

    @property
    def read_layers(self) -> list[int]:
        layers = self.config.vision_feature_layers
        return [layers] if isinstance(layers, int) else list(layers)


def with_cls(tile: Tile, leading: int) -> Tile:
    """The tile with ``leading`` CLS tokens in front, which have no cell."""
    none = torch.full((leading,), -1)
    return Tile(tile.grid, torch.cat([none[:, None].expand(-1, 3), tile.cells]), torch.cat([none, tile.source]))
