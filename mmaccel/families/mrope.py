"""Families with three position axes (M-RoPE), which the model computes from ids, sizes and the previous call."""

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
    """M-RoPE positions under a kept cache.

    Stock code reads ``rope_deltas`` off the module, which belongs to the last call of anyone, and cannot place new pictures
    behind cached ones.
    """

    #: whether types of tokens say where pictures are
    typed: ClassVar[bool] = True
    #: the arguments that say how large pictures and clips are
    sized_by: ClassVar[tuple[str, ...]] = ("image_grid_thw", "video_grid_thw")

    def sizes_given(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has picture sizes; placeholders without them are refused where the layout is made."""
        return any(kwargs.get(name) is not None for name in self.sized_by)

    def has_pictures(self, kwargs: Mapping[str, Any], ids: Tensor | None, types: Tensor | None) -> bool:
        """Whether the new tokens of a call, ``ids`` of ``types [B, q]``, have pictures."""
        return self.sizes_given(kwargs) and types is not None and bool(types.any())

    def new_positions(
        self, ids: Tensor, types: Tensor | None, mask: Tensor | None, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """``[3, B, q]``: positions of new tokens with pictures, counted from 0. ``mask [B, q]`` is False for padding."""
        given = {key: x for key, x in kwargs.items() if key not in ("input_ids", "inputs_embeds", "attention_mask")}
        positions: Tensor = self.inner.get_rope_index(
            ids, **{**given, "mm_token_type_ids": types, "attention_mask": mask}
        )[0]
        return positions

    @property
    def axes(self) -> int:
        """Time, height and width."""
        return 3

    def behind(self, new: Tensor, start: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        """:meth:`new_positions` ``[axes, B, q]`` of tokens that follow a cache, whose text goes on at ``start [B]``.

        ``mask [B, q]`` is False for padding; ``before [B, seen]`` are the ids in the cache, None where the call does not give
        them.
        """
        return new + start[None, :, None]

    def in_generate(self, text: Tensor, new: Tensor | None = None) -> Tensor:
        """Position ids of ``generate``, from those of text ``[1, B, S]`` and, with new pictures, all axes ``[axes, B, S]``."""
        return text if new is None else torch.cat([text.to(new).expand(1, *new.shape[1:]), new])

    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """The model's functions that compute positions."""
        return [
            *super().wrappers(),
            (self.model, "_prepare_position_ids_for_generation", functools.partial(_continue_generate, self)),
            (self.inner, "compute_3d_position_ids", functools.partial(_continue_forward, self)),
        ]


def next_positions(state: Continued, length: int) -> Tensor:
    """``[1, B, length]``: positions of the tokens that follow the cache; the runtime rewrites them."""
    at = torch.arange(state.seen, state.seen + length, device=state.offset.device)
    offset = state.offset if state.ahead is None else state.offset - state.ahead
    return (at - offset[:, None])[None]


def _after(x: Tensor | None, seen: int) -> Tensor | None:
    return None if x is None else x[:, seen:]


def _continue_generate(
    family: ThreeAxes, original: Callable[..., Any], current: Callable[[], Call | None]
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
        new_ids, types = ids[:, seen:], _after(model_kwargs.get("mm_token_type_ids"), seen)
        pictures = family.has_pictures(model_kwargs, new_ids, types)
        if state is not None and not pictures:
            whole = (ids if mask is None else mask).shape[1]
            new = next_positions(state, max(whole - seen, 1))
            padded = torch.cat([new.new_zeros(1, new.shape[1], whole - new.shape[2]), new], dim=-1)
            return family.in_generate(padded.to(inputs_tensor.device))
        if before and state is None:
            if pictures:
                raise UnsupportedError(
                    "This cache holds pictures that the bare model read, and transformers cannot place others behind them; "
                    "begin the conversation accelerated, or give all of it to one call."
                )
            # the cache was filled before the model was accelerated
            return original(inputs_tensor, model_kwargs)
        # transformers 5.17 would continue with `rope_deltas` here
        text = GenerationMixin._prepare_position_ids_for_generation(family.model, inputs_tensor, model_kwargs)[None]
        if not pictures:
            return family.in_generate(text)
        mask_behind = _after(mask, seen)
        new = family.new_positions(new_ids, types, mask_behind, model_kwargs)
        real = ids.new_full((len(ids),), seen) if mask is None else mask[:, :seen].sum(-1)
        start = (real if state is None else seen - state.offset).to(new.device)
        new = family.behind(new, start, mask_behind, ids[:, :seen])
        return family.in_generate(text, torch.cat([new.new_zeros(len(new), len(ids), seen), new], dim=-1))

    return positions


def _continue_forward(
    family: ThreeAxes, original: Callable[..., Any], current: Callable[[], Call | None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def positions(*args: Any, **kwargs: Any) -> Tensor | None:
        call, cache = current(), cache_in(kwargs)
        ids, embeds, types = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("mm_token_type_ids")
        tokens = ids if embeds is None else embeds
        if call is None or cache is None or tokens is None:
            return original(*args, **kwargs)
        length, seen, state = tokens.shape[1], cache.get_seq_length(), call.continued(cache)
        types = types[:, -length:] if types is not None else None
        pictures = family.has_pictures(kwargs, ids, types)
        if not seen:
            # a conversation that begins without pictures has no use for another one's `rope_deltas`
            cache.mmaccel_text = not pictures
            return original(*args, **kwargs)
        text_only = getattr(cache, "mmaccel_text", False)
        if pictures and ids is not None and (state is not None or text_only):
            mask = kwargs.get("attention_mask")
            mask = None if mask is None else mask[:, -length:]
            new = family.new_positions(ids, types, mask, kwargs)
            if state is None:
                return family.behind(new, new.new_full((len(ids),), seen), mask, ids[:, :0])
            return family.behind(new, (seen - state.offset).to(new.device), mask, None)
        if state is not None:
            return next_positions(state, length).expand(family.axes, -1, -1).to(tokens.device)
        return None if text_only else original(*args, **kwargs)

    return positions
