"""PaliGemma: one square picture, SigLIP tower, every patch a token; all of the prompt attends to all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from .base import BothWays, Facts
from .gemma3 import within


class PaliGemma(BothWays):
    """``n * n`` tokens a picture, raster order; the prompt, text too, attends both ways, and what follows it causally."""

    name = "paligemma"
    model_types = ("paligemma",)
    place = 15
    facts = Facts(clips=False, cls=False)
    extra_inputs = ("token_type_ids",)
    mutual_type = 0
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

    def bidirectional_groups(
        self, ids: Tensor, valid: Tensor, extra_inputs: Mapping[str, Any], seen: int
    ) -> Tensor | None:
        groups = super().bidirectional_groups(ids, valid, extra_inputs, seen)
        if groups is not None:
            within(self.name, groups, getattr(self.text.config, "sliding_window", None), "prompt")
        return groups
