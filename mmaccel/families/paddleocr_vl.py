"""PaddleOCR-VL: pages of any size, patches row by row, a projector behind the tower that joins blocks of 2x2; M-RoPE."""

from __future__ import annotations

from torch import Tensor

from ..core.layout import Modality
from .base import Facts, raster_blocks
from .qwen_vl import Qwen2VL
from .tower import EncoderCall


class RasterVL(Qwen2VL):
    """Families that pack pictures of any size as Qwen's do, but with the patches of each row by row."""

    facts = Facts("yes, any size", clips=False, cls=False, merging="2x2 blocks")
    modalities = ("image",)
    attention_name = "self_attn"

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """The blocks that the projector joins, whose patches are in different rows."""
        assert width is not None
        return raster_blocks(patches // width, self.merge, width)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        return self.blocks_mean(encoded, values)


class PaddleOcrVL(RasterVL):
    """One token per block of 2x2 patches, in raster order."""

    name = "paddleocr_vl"
    model_types = ("paddleocr_vl",)
    place = 20
    reads_pages = True
    tower_names = {"image": "visual"}
    layers_path = "vision_model.encoder.layers"
