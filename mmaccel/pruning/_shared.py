"""What several selectors share: attention scores of the vision tower, and the size of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.layout import Unit
from ..core.reduction import top_mask
from ..errors import MmaccelError, UnsupportedError
from ..method import ModelFacts, ProjectorMethod, Tap, TokenBatch

#: entries of a block of similarities held at once
BLOCK = 1 << 24


@dataclass(frozen=True)
class AttentionGuided(ProjectorMethod):
    """Base of selectors that rank tokens by the attention they get in one layer of the vision tower.

    Parameters
    ----------
    query : whose attention counts: ``cls``, the CLS token's; ``all``, the mean over all tokens; ``auto``, the CLS token's
        where the tower has one, else all tokens'.
    layer : tower layer, counted as Python counts; ``None`` is the one whose output the language model reads.
    """

    unit: ClassVar[Unit] = "tile"

    query: Literal["auto", "cls", "all"] = "auto"
    layer: int | None = None

    def __post_init__(self) -> None:
        if self.query not in ("auto", "cls", "all"):
            raise MmaccelError(f"{self.name} knows query 'auto', 'cls' and 'all', not {self.query!r}.")

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
        if self.query == "cls" and not family.has_cls:
            raise UnsupportedError(
                f"{self.name} asks the CLS token, which the vision tower of {family.name} lacks; "
                "give query='all' to rank by the attention received from all tokens."
            )

    def attention(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """``[N, n]`` float32 scores, NaN where there are none, and ``[N, n]`` bool, the valid tokens that have one."""
        score = tokens.signals[self.taps()[0].kind][:, 0].float().masked_fill(~tokens.valid, torch.nan)
        return score, ~score.isnan()


def on_grid(tokens: TokenBatch) -> Tensor:
    """``[N, n]`` bool: tokens with a cell (not newlines); in a unit without any cells, all."""
    cell = tokens.valid & (tokens.cells >= 0).all(-1)
    return torch.where(cell.any(1, keepdim=True), cell, tokens.valid)


def filled(kept: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``kept [N, n]`` and, where it falls short of ``count [N]``, the first others: budgets larger than the picture proper
    fall back on newline tokens."""
    return kept | top_mask(kept.float(), valid & ~kept, count - kept.sum(1))


def gather(x: Tensor, slots: Tensor) -> Tensor:
    """``x [N, n, d]`` at ``slots [N, m]``: ``[N, m, d]``."""
    return x.gather(1, slots[..., None].expand(-1, -1, x.shape[2]))
