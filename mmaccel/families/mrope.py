"""Families whose positions have three axes (M-RoPE), which the model itself makes of ids, sizes and what was called before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.transformers_api import cache_in
from ..errors import UnsupportedError
from .base import Call, Continued, Family, Wrapper


class ThreeAxes(Family):
    """Positions under a kept cache: stock code reads ``rope_deltas`` off the module, which belongs to whoever called last, and
    cannot place new pictures behind cached ones."""

    #: the arguments that say how large pictures and clips are
    sized_by: ClassVar[tuple[str, ...]] = ("image_grid_thw", "video_grid_thw")

    def sizes_given(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call comes with pictures; placeholders without them are refused where the layout is made."""
        return any(kwargs.get(name) is not None for name in self.sized_by)

    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """The functions of the model that make positions."""
        return [
            *super().wrappers(),
            (self.model, "_prepare_position_ids_for_generation", functools.partial(_continue_generate, self)),
            (self.inner, "compute_3d_position_ids", functools.partial(_continue_forward, self)),
            (self.inner, "get_rope_index", _place_new_pictures),
        ]


def _kept(call: Call | None, cache: Any = None) -> Continued | None:
    """The kept cache this call continues, or None."""
    return call.continued(cache) if call is not None else None


def next_positions(state: Continued, length: int) -> Tensor:
    """``[1, B, length]``: positions of the tokens that follow the cache, which the runtime writes anew."""
    at = torch.arange(state.seen, state.seen + length, device=state.offset.device)
    offset = state.offset if state.ahead is None else state.offset - state.ahead
    return (at - offset[:, None])[None]


def _continue_generate(
    family: ThreeAxes, original: Callable[..., Any], current: Callable[[], Call | None]
) -> Callable[..., Any]:
    # importing it takes seconds
    from ..core.transformers_api import GenerationMixin

    @functools.wraps(original)
    def positions(inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        call, cache = current(), cache_in(model_kwargs)
        seen = cache.get_seq_length() if cache is not None else 0
        ids, types = model_kwargs.get("input_ids"), model_kwargs.get("mm_token_type_ids")
        if ids is None or ids.shape[1] == 0:
            ids = inputs_tensor
        if call is None or not seen:
            return original(inputs_tensor, model_kwargs)
        state = _kept(call, cache)
        if family.sizes_given(model_kwargs) and types is not None and bool(types[:, seen:].any()):
            if state is None and bool(family.visual(ids[:, :seen]).any()):
                raise UnsupportedError(
                    "This cache holds pictures that the bare model read, and transformers cannot place others behind them; "
                    "begin the conversation accelerated, or give all of it to one call."
                )
            # transformers 5.17 would go on with `rope_deltas` here
            text = GenerationMixin._prepare_position_ids_for_generation(family.model, inputs_tensor, model_kwargs)
            rest = {key: value for key, value in model_kwargs.items() if key != "input_ids"}
            vision, _ = family.inner.get_rope_index(ids, **rest)
            return torch.cat([text[None].expand(1, *vision.shape[1:]), vision])
        if state is None:
            if bool(family.visual(ids[:, :seen]).any()):
                # the cache was filled before the model was accelerated
                return original(inputs_tensor, model_kwargs)
            return GenerationMixin._prepare_position_ids_for_generation(family.model, inputs_tensor, model_kwargs)[None]
        mask = model_kwargs.get("attention_mask")
        whole = ids.shape[1] if mask is None else mask.shape[1]
        new = next_positions(state, max(whole - seen, 1))
        cached = new.new_zeros(1, new.shape[1], whole - new.shape[2])
        return torch.cat([cached, new], dim=-1).to(inputs_tensor.device)

    return positions


def _continue_forward(
    family: ThreeAxes, original: Callable[..., Any], current: Callable[[], Call | None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def positions(*args: Any, **kwargs: Any) -> Tensor | None:
        call, cache = current(), cache_in(kwargs)
        ids, embeds, types = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("mm_token_type_ids")
        if call is None or cache is None or embeds is None:
            return original(*args, **kwargs)
        length, seen, state = embeds.shape[1], cache.get_seq_length(), _kept(call, cache)
        new_types = types[:, -length:] if types is not None else None
        pictures = family.sizes_given(kwargs) and new_types is not None and bool(new_types.any())
        if not seen:
            # a conversation that begins without pictures has no use for another one's `rope_deltas`
            cache.mmaccel_text = not pictures
            return original(*args, **kwargs)
        if pictures and ids is not None and (state is not None or getattr(cache, "mmaccel_text", False)):
            mask = kwargs.pop("attention_mask", None)
            rest = {**kwargs, "mm_token_type_ids": new_types}
            del rest["input_ids"], rest["inputs_embeds"]
            rest["attention_mask"] = None if mask is None else mask[:, -length:]
            new, _ = family.inner.get_rope_index.__wrapped__(ids, **rest)
            return new + (seen - (state.offset.to(new.device)[:, None] if state is not None else 0))
        if state is not None:
            return next_positions(state, length).expand(3, -1, -1).to(embeds.device)
        return None if getattr(cache, "mmaccel_text", False) else original(*args, **kwargs)

    return positions


def _place_new_pictures(original: Callable[..., Any], current: Callable[[], Call | None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rope_index(input_ids: Tensor, mm_token_type_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        state = _kept(current(), cache_in(kwargs))
        if state is None or input_ids.shape[1] <= state.seen:
            return original(input_ids, mm_token_type_ids, *args, **kwargs)
        # only the new part: its grids are all that was given, and it starts where the cache ends
        seen, mask = state.seen, kwargs.pop("attention_mask", None)
        new, _ = original(
            input_ids[:, seen:],
            mm_token_type_ids[:, seen:],
            *args,
            attention_mask=None if mask is None else mask[:, seen:],
            **kwargs,
        )
        new = new + (seen - state.offset).to(new.device)[None, :, None]
        positions = torch.cat([new.new_zeros(3, len(input_ids), seen), new], dim=-1)
        length = torch.full((len(input_ids),), input_ids.shape[1]) if mask is None else mask.sum(-1)
        return positions, (new.amax((0, 2)) + 1 - length.to(new.device))[:, None]

    return rope_index
