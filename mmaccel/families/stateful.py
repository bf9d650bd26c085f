"""Language models of which some layers carry a state from token to token, and keep no keys."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.transformers_api import cache_in
from .base import Call, Family, Wrapper


class Stateful(Family):
    """Base of families with recurrent layers. A token that is dropped before such a layer never enters its state; one
    that is dropped behind it stays in the state."""

    stateful = True
    undivided = "has layers with a recurrent state, and two states do not join"
    #: the attribute of a layer that is the module with its state
    net_name: ClassVar[str] = "linear_attn"

    @cached_property
    def recurrent(self) -> tuple[int, ...]:  # type: ignore[override]
        """Layers of the kind that carries a state."""
        kinds = self.config.text_config.layer_types
        return tuple(layer for layer, kind in enumerate(kinds) if kind in self.carrying)

    @cached_property
    def attending(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(layer for layer in range(self.depth) if layer not in self.recurrent)

    def net_in(self, layer: int) -> Any:
        """The module of a layer that carries its state."""
        return getattr(self.text.layers[layer], self.net_name)

    def stored_from(self, layer: int) -> int:
        return bisect.bisect_left(self.attending, layer)

    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """Also refuses rows that continue with different numbers of tokens: padding behind other tokens changes a state,
        even with a mask."""
        rows = [(number, functools.partial(_row_by_row, number)) for number in self.recurrent]
        return [*super().wrappers(), *((self.net_in(number), "forward", by_row) for number, by_row in rows)]

    def mask_argument(self, real: Tensor | None) -> dict[str, Tensor | None]:
        """A mask of padding, which layers with a state need."""
        kinds = dict.fromkeys(("full_attention", *self.config.text_config.layer_types))
        return {**kinds, **dict.fromkeys(self.carrying, real)}


def _row_by_row(
    number: int, original: Callable[..., Tensor], current: Callable[[], Call | None]
) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        call, cache = current(), cache_in(kwargs)
        layer = None if cache is None else cache.layers[number]
        if call is None or attention_mask is None or not getattr(layer, "begun", False):
            return original(hidden_states, attention_mask=attention_mask, **kwargs)
        assert layer is not None
        states = torch.zeros_like(hidden_states)
        for row, real in enumerate(attention_mask.bool().cpu()):
            if bool(real.any()):
                tokens = real.to(hidden_states.device)
                with layer.of_row(row):
                    states[row, tokens] = original(hidden_states[row, tokens][None], **kwargs)[0]
        return states

    return forward
