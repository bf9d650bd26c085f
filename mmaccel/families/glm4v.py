"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: dynamic resolution, blocks of 2x2 patches, M-RoPE, time stamps between frames."""

from __future__ import annotations

from torch import nn

from ..core.layout import Modality
from .base import Description
from .qwen_vl import Qwen2VL


class Glm4v(Qwen2VL):
    """Pictures and positions as in Qwen2-VL. A clip's frames are runs of their own, with time stamps between them and the
    placeholder of pictures, so a prompt has pictures or clips. RoPE turns half of each head, as neighbours."""

    name = "glm4v"
    model_types = ("glm4v",)
    place = 9
    stamped = True
    halves = False

    def __init__(self, model: nn.Module | Description, processor: object = None) -> None:
        super().__init__(model, processor)
        self.halves = False

    def token_id(self, modality: Modality) -> int | None:
        """Frames have the placeholder of pictures."""
        return super().token_id("image")


class Glm46V(Glm4v):
    """The same around any vision tower and language model that its configuration names, by default those of GLM-4.1V."""

    name = "glm46v"
    model_types = ("glm46v",)


class Glm4vMoe(Glm4v):
    """GLM-4.5V, with experts in all but the first layers of the language model; RoPE turns half of each head, as halves."""

    name = "glm4v_moe"
    model_types = ("glm4v_moe",)


class GlmOcr(Glm4v):
    """GLM-OCR: a small model that reads pages; its tower normalises queries and keys and has no learned positions."""

    name = "glm_ocr"
    model_types = ("glm_ocr",)
    reads_pages = True
