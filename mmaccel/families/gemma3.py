"""Gemma 3: square pictures, pooled, whose tokens attend to each other both ways; layers with windows have their own RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core.layout import Modality
from ..errors import UnsupportedError
from .base import BOTH_WAYS, Facts, Family, block_mean, raster_blocks
from .tower import EncoderCall


class Gemma3(Family):
    """Adapter of Gemma 3: as many tokens a picture, whatever its size; crops of pan and scan are pictures of their own."""

    name = "gemma3"
    model_types = ("gemma3",)
    place = 15
    heads_first = True
    facts = Facts(clips=False, cls=False, merging="blocks of pooling")
    extra_inputs = ("token_type_ids",)
    masks_above = True
    undivided = BOTH_WAYS
    halves = False
    no_return = "has layers of two RoPEs, and pictures that may attend to each other both ways"
    #: whether a picture sees all of itself where a window is narrower
    over_windows = True

    @property
    def cells(self) -> int:
        return int(self.config.mm_tokens_per_image**0.5)

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        return raster_blocks(self.side, self.side // self.cells)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """Averages as the projector makes them, picture after picture."""
        return block_mean(torch.cat(values), self.side, self.side // self.cells).flatten(0, 1)

    def rope_kind(self, layer: int) -> str:
        """Local and global layers have RoPEs of different angles."""
        return str(self.text.config.layer_types[layer])

    def mask_argument(self, real: Tensor | None) -> dict[str, None]:
        return {"full_attention": None, "sliding_attention": None}

    def bidirectional_groups(
        self, ids: Tensor, valid: Tensor, extra_inputs: Mapping[str, Any], seen: int
    ) -> Tensor | None:
        """Runs of picture tokens, if the call has token types, as in the bare model."""
        if extra_inputs.get(self.extra_inputs[0]) is None:
            return None
        # on a second turn the argument may be that of other tokens than the new ones
        picture = self.visual(ids)
        begins = picture & ~functional.pad(picture, (1, 0))[:, :-1]
        runs = (begins.cumsum(1) - 1).masked_fill(~picture, -1)
        if self.over_windows:
            within(self.name, runs, self.text.config.sliding_window)
        return runs


def within(name: str, runs: Tensor, window: int | None, what: str = "picture") -> None:
    """Refuse a bidirectional group wider than the attention window; transformers' masks then ignore the window.

    ``runs [B, S]`` as :meth:`~.base.Family.bidirectional_groups` returns it."""
    longest = int(functional.one_hot(runs + 1)[..., 1:].sum(1).amax()) if bool((runs >= 0).any()) else 0
    if window is not None and longest > window:
        raise UnsupportedError(
            f"A {what} of {longest} tokens is wider than the sliding window of this {name} model ({window}), which "
            "transformers lets it see beyond and mmaccel does not; have the processor make fewer tokens of it."
        )
