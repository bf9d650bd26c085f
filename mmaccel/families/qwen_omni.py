"""The thinkers of Qwen-Omni: visual tokens are reduced, those of sounds stay, as those of words do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.transformers_api import cache_in
from ..errors import UnsupportedError
from .base import Call, Facts, Wrapper
from .mrope import next_positions
from .qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL


class Qwen25Omni(Qwen25VL):
    """A clip with its sound is cut into chunks between whole frames, so every frame is a segment. Sounds count as text: as many
    positions as tokens, on all axes."""

    name = "qwen2_5_omni"
    model_types = ("qwen2_5_omni_thinker",)
    place = 8
    facts = Facts("yes, any size", cls=False, merging="2x2 blocks, in full-attention layers")
    since = "5.23"
    stamped = True

    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """Positions under a kept cache, see :func:`positions_of`."""
        return positions_of(self)


class Qwen3OmniMoe(Qwen3VL):
    """The same behind a tower with DeepStack, with experts in the layers of the language model."""

    name = "qwen3_omni_moe"
    model_types = ("qwen3_omni_moe_thinker",)
    since = "5.23"

    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """Positions under a kept cache, see :func:`positions_of`."""
        return positions_of(self)


def positions_of(family: Qwen2VL) -> list[tuple[Any, str, Wrapper]]:
    """Stock code reads ``rope_deltas`` off the module, which belongs to whoever called last, and gives pictures behind a cache
    the positions of words."""
    return [
        (family.model, "_prepare_position_ids_for_generation", functools.partial(_continue_generate, family)),
        (family.inner, "compute_3d_position_ids", functools.partial(_continue_forward, family)),
    ]


def _shows(family: Qwen2VL, given: Mapping[str, Any], ids: Tensor) -> bool:
    """Whether a call comes with pictures for placeholders in ``ids``."""
    return family.sizes_given(given) and bool(family.visual(ids).any())


def _sounds(given: Mapping[str, Any]) -> Tensor | None:
    """Frames of every sound."""
    mask = given.get("feature_attention_mask")
    return given.get("audio_feature_lengths") if mask is None else mask.sum(-1)


def _placed(family: Qwen2VL, ids: Tensor, mask: Tensor | None, start: Tensor, given: Mapping[str, Any]) -> Tensor:
    """``[3, B, q]``: positions of new tokens ``ids [B, q]`` with pictures, of which the first of row b has ``start [B]``."""
    new, _ = family.inner.get_rope_index(
        ids,
        given.get("image_grid_thw"),
        given.get("video_grid_thw"),
        torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :],
        bool(given.get("use_audio_in_video")),
        _sounds(given),
        given.get("video_second_per_grid"),
    )
    return new + start.to(new.device)[None, :, None]


def _continue_generate(
    family: Qwen2VL, original: Callable[..., Any], current: Callable[[], Call | None]
) -> Callable[..., Any]:
    # importing it takes seconds
    from ..core.transformers_api import GenerationMixin

    @functools.wraps(original)
    def positions(inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        call, cache = current(), cache_in(model_kwargs)
        seen = cache.get_seq_length() if cache is not None else 0
        ids, mask = model_kwargs.get("input_ids"), model_kwargs.get("attention_mask")
        if ids is None or ids.shape[1] == 0:
            ids = inputs_tensor
        if call is None or not seen:
            return original(inputs_tensor, model_kwargs)
        state, before = call.continued(cache), bool(family.visual(ids[:, :seen]).any())
        text = GenerationMixin._prepare_position_ids_for_generation(family.model, inputs_tensor, model_kwargs)[None]
        if _shows(family, model_kwargs, ids[:, seen:]):
            if state is None and before:
                raise UnsupportedError(
                    "This cache holds pictures that the bare model read, and transformers cannot place others behind them; "
                    "begin the conversation accelerated, or give all of it to one call."
                )
            real = ids.new_full((len(ids),), seen) if mask is None else mask[:, :seen].sum(-1)
            start = real if state is None else seen - state.offset
            new = _placed(family, ids[:, seen:], mask, start, model_kwargs)
            vision = torch.cat([new.new_zeros(3, len(ids), seen), new], dim=-1)
            return torch.cat([text.to(vision), vision])
        if state is None:
            # pictures in the cache were read before the model was accelerated
            return original(inputs_tensor, model_kwargs) if before else text
        new = next_positions(state, max((ids if mask is None else mask).shape[1] - seen, 1))
        return torch.cat([new.new_zeros(1, new.shape[1], seen), new], dim=-1).to(inputs_tensor.device)

    return positions


def _continue_forward(
    family: Qwen2VL, original: Callable[..., Any], current: Callable[[], Call | None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def positions(**kwargs: Any) -> Tensor | None:
        call, cache = current(), cache_in(kwargs)
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if call is None or cache is None or embeds is None:
            return original(**kwargs)
        seen, state = cache.get_seq_length(), call.continued(cache)
        pictures = ids if ids is not None and _shows(family, kwargs, ids) else None
        if not seen:
            # a conversation that begins without pictures has no use for another one's `rope_deltas`
            cache.mmaccel_text = pictures is None
            return original(**kwargs)
        words = getattr(cache, "mmaccel_text", False)
        if pictures is not None and (state is not None or words):
            start = pictures.new_full((len(pictures),), seen) if state is None else seen - state.offset
            return _placed(family, pictures, kwargs.get("attention_mask"), start, kwargs)
        if state is not None:
            return next_positions(state, embeds.shape[1]).expand(3, -1, -1).to(embeds.device)
        return None if words else original(**kwargs)

    return positions
