"""The thinkers of Qwen-Omni: visual tokens are reduced; those of sounds stay, as text does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .mrope import ThreeAxes
from .qwen_vl import Qwen3VL, Qwen25VL


class _Thinker(ThreeAxes):
    """Positions are computed from ids and lengths of sounds, without token types."""

    def has_pictures(self, kwargs: Mapping[str, Any], ids: Tensor | None, types: Tensor | None) -> bool:
        """Whether ``ids`` have placeholders of pictures."""
        return ids is not None and self.sizes_given(kwargs) and bool(self.visual(ids).any())

    def new_positions(
        self, ids: Tensor, types: Tensor | None, mask: Tensor | None, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Positions as the model computes them, with sounds."""
        sounds = kwargs.get("feature_attention_mask")
        positions: Tensor = self.inner.get_rope_index(
            ids,
            kwargs.get("image_grid_thw"),
            kwargs.get("video_grid_thw"),
            torch.ones_like(ids) if mask is None else mask,
            bool(kwargs.get("use_audio_in_video")),
            kwargs.get("audio_feature_lengths") if sounds is None else sounds.sum(-1),
            kwargs.get("video_second_per_grid"),
        )[0]
        return positions


class Qwen25Omni(_Thinker, Qwen25VL):
    """A clip with its sound is cut into chunks between whole frames, so every frame is a segment. Sounds count as text: as many
    positions as tokens, on all axes."""

    name = "qwen2_5_omni"
    model_types = ("qwen2_5_omni_thinker",)
    place = 8
    since = "5.23"
    stamped = True


class Qwen3OmniMoe(_Thinker, Qwen3VL):
    """The same behind a tower with DeepStack, with experts in the layers of the language model."""

    name = "qwen3_omni_moe"
    model_types = ("qwen3_omni_moe_thinker",)
    since = "5.23"
