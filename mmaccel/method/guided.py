"""Base of methods that rank tokens by the attention they receive in the vision tower."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.layout import Unit
from .base import ModelFacts, Tap
from .tokens import ProjectorMethod, TokenBatch


@dataclass(frozen=True)
class AttentionGuided(ProjectorMethod):
    """A method that ranks tokens by the attention they receive in one layer of the vision tower.

    Parameters
    ----------
    query : whose attention counts: ``cls``, the CLS token's; ``all``, the mean over all tokens; ``auto``, the CLS token's
        where the tower has one, else all tokens'.
    layer : tower layer, counted as Python counts; ``None`` is the one whose output the language model reads.
    """

    unit: ClassVar[Unit] = "tile"

    query: Literal["auto", "cls", "all"] = "auto"
    layer: int | None = None

    def fit(self, family: ModelFacts) -> AttentionGuided:
        """``auto`` becomes ``cls`` or ``all``."""
        return replace(self, query="cls" if family.has_cls else "all") if self.query == "auto" else self

    @property
    def _kind(self) -> Literal["cls_attention", "received_attention"]:
        return "received_attention" if self.query == "all" else "cls_attention"

    def taps(self) -> tuple[Tap, ...]:
        """The attention of ``layer``."""
        return (Tap(self._kind, (self.layer,)),)

    def check(self, family: ModelFacts) -> None:
        """Refuse ``query="cls"`` on towers without a CLS token."""
        if self.query == "cls":
            self.require_cls(family, "give query='all' to rank by the attention received from all tokens")

    def attention(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """``[N, n]`` float32 scores, NaN for tokens without a score, and ``[N, n]`` bool, the valid tokens that have one."""
        score = tokens.signals[self.taps()[0].kind][:, 0].float().masked_fill(~tokens.valid, torch.nan)
        return score, ~score.isnan()
