"""PaliGemma: one square picture, SigLIP tower, every patch a token; all of the prompt attends to all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .base import BOTH_WAYS, Facts, Family, passed_on, types_of_new
from .gemma3 import within


class PaliGemma(Family):
    """``n * n`` tokens a picture, raster order; the prompt, text too, attends both ways, and what follows it causally."""

    name = "paligemma"
    model_types = ("paligemma",)
    place = 15
    facts = Facts(clips=False, cls=False)
    extra_inputs = ("token_type_ids",)
    masks_above = True
    no_return = undivided = BOTH_WAYS
    first_position = 1

    def __init__(self, model: Any, processor: Any = None) -> None:
        super().__init__(model, processor)
        text = model.config.text_config
        capped = getattr(text, "attn_logit_softcapping", None)
        if self.inner is not None and capped and text._attn_implementation != "eager":
            raise UnsupportedError(
                "The language model of a PaliGemma 2 caps the scores of its attention, which only eager attention does here; "
                'load it with attn_implementation="eager".'
            )

    def mask_argument(self, real: Tensor | None) -> Tensor:
        return passed_on()

    def bidirectional_groups(
        self, ids: Tensor, valid: Tensor, extra_inputs: Mapping[str, Any], seen: int
    ) -> Tensor | None:
        """The whole prompt, if the call has token types, as in the bare model."""
        kinds = extra_inputs.get("token_type_ids")
        if kinds is None:
            return None
        groups = torch.where((types_of_new(kinds, ids, seen) == 0) & valid, 0, -1)
        within(self.name, groups, getattr(self.text.config, "sliding_window", None), "prompt")
        return groups
