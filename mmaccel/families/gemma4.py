"""Gemma 4: pictures of any size and clips; in layers with windows the tokens of a picture attend to each other both ways."""

from __future__ import annotations

from itertools import islice
from typing import Any, ClassVar

from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, consecutive
from .gemma3 import Gemma3
from .tower import EncoderCall


class Gemma4(Gemma3):
    """Layers of both kinds have heads of their own width and number. Frames of a clip are runs of their own, with time stamps
    between them. The smaller models, every layer of which has an embedding of its own, are refused."""

    name = "gemma4"
    model_types = ("gemma4",)
    heads = ("gemma4_assistant",)
    heads_first = False
    facts = Facts("yes, any size", cls=False, merging="-")
    modalities = ("image", "video")
    extra_inputs = ("mm_token_type_ids",)
    over_windows = False
    closed = "pads pictures of several sizes to one"
    layers_path = ""

    @property
    def pooled(self) -> int:
        """Patches along one side of the block that makes a token."""
        return int(self.vision.pooling_kernel_size)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        given = encoded.arguments
        at = given[f"{modality}_position_ids"]
        frames = [1] * len(at)
        if modality == "video":
            # before transformers 5.20 clips had an axis of their own
            frames = [at.shape[1]] * len(at) if at.dim() == 4 else [int(n) for n in given["num_frames_per_video"]]
        sizes = iter(((at.flatten(0, -3).amax(1) + 1) // self.pooled).tolist())
        return consecutive([[(1, rows, columns) for columns, rows in islice(sizes, n)] for n in frames], clips=True)

    def is_bidirectional(self, layer: int) -> bool:
        """Whether the layer has a window."""
        return self.rope_kind(layer) == "sliding_attention"

    def bidirectional_groups(self, ids: Tensor, valid: Tensor, extra_inputs: Any, seen: int) -> Tensor | None:
        both = self.text.config.use_bidirectional_attention == "vision"
        return super().bidirectional_groups(ids, valid, extra_inputs, seen) if both else None


class Gemma4Unified(Gemma4):
    """Without a tower: each block of patches is projected by itself, into a language model of the same kind."""

    name = "gemma4_unified"
    model_types = ("gemma4_unified",)
    heads = ("gemma4_unified_assistant",)
    tower_names: ClassVar[dict[Modality, str]] = {"image": "embed_vision", "video": "embed_vision"}
    over_windows = True
    closed = "has no layers"
    #: the processor has put the patches of a block together
    pooled = 1

    def is_bidirectional(self, layer: int) -> bool:
        """All do in transformers' forward, which ``generate`` calls too unless its cache is static."""
        return True
