"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: dynamic resolution, 2x2 merger, M-RoPE; Qwen3-VL adds DeepStack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.layout import Modality
from .base import Description, Facts
from .grids import PackedGrids
from .mrope import ThreeAxes
from .tower import EncoderCall


class Qwen2VL(PackedGrids, ThreeAxes):
    """Adapter of Qwen2-VL: a clip is one run of placeholders."""

    name = "qwen2_vl"
    model_types = ("qwen2_vl",)
    place = 6
    tower_names = {"image": "visual", "video": "visual"}
    layers_path = "blocks"
    attention_name = "attn"


class Windowed(PackedGrids):
    """Base of families whose tower works in windows: every block sees window order, most attend only inside a window."""

    facts = Facts("yes, any size", cls=False, merging="2x2 blocks, in full-attention layers")
    layers_path = "blocks"
    attention_name = "attn"

    def merging_layers(self) -> list[int]:
        """The blocks that attend to whole frames: their keys can be compared, and the windows between them just shrink."""
        return sorted(self.vision.fullatt_block_indexes)

    def tap_layer(self, layer: float | None) -> int:
        """The last block that attends to a whole frame, by default."""
        if layer is not None:
            return super().tap_layer(layer)
        return max(self.vision.fullatt_block_indexes)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        merged = super().to_tokens(modality, encoded, values)
        order = torch.cat(self.window_order(modality, encoded)).to(merged.device)
        return torch.empty_like(merged).index_copy_(0, order, merged)

    def tower_order(self, encoded: EncoderCall) -> Tensor:
        blocks = torch.cat(self.window_order("image", encoded))
        return (blocks[:, None] * self.merge**2 + torch.arange(self.merge**2)).flatten()

    def window_order(self, modality: Modality, encoded: EncoderCall) -> list[Tensor]:
        """Order of tokens in the tower's sequence: windows in raster order, cells in raster order in
        each; one tensor a picture."""
        side = self.vision.window_size // self.merge // self.vision.patch_size
        offset, orders = 0, []
        for t, h, w in self.grids(modality, encoded):
            frame, row, col = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w)).view(-1, 3).T
            window = (frame * -(-h // side) + row // side) * -(-w // side) + col // side
            orders.append(offset + window.argsort(stable=True))
            offset += t * h * w
        return orders


class Qwen25VL(Windowed, Qwen2VL):
    """As Qwen2-VL, but the tower works in windows."""

    name = "qwen2_5_vl"
    model_types = ("qwen2_5_vl",)
    place = 7


class Qwen3VL(Qwen2VL):
    """A clip's frames are separate runs with time stamps between them; DeepStack adds features to the first layers."""

    name = "qwen3_vl"
    model_types = ("qwen3_vl",)
    place = 8
    stamped = True
    usual_std = (0.5, 0.5, 0.5)

    def __init__(self, model: nn.Module | Description, processor: Any = None) -> None:
        super().__init__(model, processor)
        self.deepstack = len(self.vision.deepstack_visual_indexes)

    def readers(self, tower: Any) -> list[nn.Module]:
        return list(tower.deepstack_merger_list)


class Qwen3VLMoe(Qwen3VL):
    """As Qwen3-VL, with experts in the layers of the language model: every token goes its own way through them."""

    name = "qwen3_vl_moe"
    model_types = ("qwen3_vl_moe",)
