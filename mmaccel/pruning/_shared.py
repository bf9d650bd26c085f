"""What several selectors share: newline tokens are dropped first."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.reduction import top_mask
from ..method import TokenBatch


def on_grid(tokens: TokenBatch) -> Tensor:
    """``[N, n]`` bool: tokens with a cell (not newlines); in a unit without any cells, all valid tokens."""
    return torch.where(tokens.celled.any(1, keepdim=True), tokens.celled, tokens.valid)


def filled(kept: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``kept [N, n]`` bool and, where these are fewer than ``count [N]``, the first other valid slots: a budget larger than
    the number of tokens on the grid is filled up with newline tokens."""
    return kept | top_mask(kept.float(), valid & ~kept, count - kept.sum(1))
