"""The thinkers of Qwen-Omni: visual tokens are reduced; those of sounds stay, as text does, but for methods that know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Layout, Modality, Sound
from .mrope import ThreeAxes
from .qwen_vl import Qwen3VL, Qwen25VL
from .tower import EncoderCall


class _Thinker(ThreeAxes):
    """Positions are computed from ids and lengths of sounds, without token types."""

    typed = False
    hears = True

    def heard(self, ids: Tensor) -> Tensor:
        """``[B, S]`` bool: the placeholders of sounds."""
        return ids == self.config.audio_token_id

    def layout(self, ids: Tensor, valid: Tensor, encoded: Mapping[Modality, EncoderCall]) -> Layout:
        """The layout with sounds, whose tokens were encoded in the order of their places."""
        row, places = (self.heard(ids) & valid).nonzero(as_tuple=True)
        ends = ((places.diff() != 1) | (row.diff() != 0)).nonzero()[:, 0] + 1
        parts = (x.tensor_split(ends.tolist()) for x in (row, places, torch.arange(len(places))))
        sounds = [Sound(int(b[0]), at, source) for b, at, source in zip(*parts, strict=True) if len(b)]
        return replace(super().layout(ids, valid, encoded), sounds=sounds)

    @property
    def sound_tower(self) -> Any:
        """The tower of sounds."""
        return self.inner.audio_tower

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
    """A clip with its sound is cut into chunks between whole frames, so every frame is a segment. Sounds have positions as text
    has: as many as tokens, on all axes."""

    name = "qwen2_5_omni"
    model_types = ("qwen2_5_omni_thinker",)
    place = 8
    since = "5.23"
    stamped = True

    def to_sounds(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Means of pairs; of an odd number the last is left out."""
        parts = values.split([(n - 1) // 2 + 1 for n in lengths.tolist()])
        return torch.cat([part[: len(part) // 2 * 2].view(-1, 2).mean(1) for part in parts])


class Qwen3OmniMoe(_Thinker, Qwen3VL):
    """The same behind a tower with DeepStack, with experts in the layers of the language model."""

    name = "qwen3_omni_moe"
    model_types = ("qwen3_omni_moe_thinker",)
    since = "5.23"
