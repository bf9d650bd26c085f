"""PruneVid's second stage: inside the language model, the tokens of every still and every frame that the question looks at."""

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import group_sizes, top_in_groups
from ..core.reduction import Reduction
from ..method import LayerAttention, LayerMethod, TokenBatch, register
from ..method.blocks import question_peak


@register
class PruneVidSelect(LayerMethod):
    """Text-guided pruning, by itself for what stands still in a scene and for every frame.

    *PruneVid: Visual Token Pruning for Efficient Video Large Language Models*, Findings of ACL 2025, arXiv 2412.16117; its
    second stage. (The recipe ``prunevid`` merges before it and drops the keys of what it drops from the cache.)

    ``a_j`` is the largest attention that any head and any token of text behind the pictures pays to token ``j`` in layer
    ``layer - 1``. The static tokens of a scene, those that a stage before this one merged over the same frames
    (:attr:`TokenBatch.until`), are one group, and the other tokens of every frame another; of each the same share stays, those
    of largest ``a``. Shares are rounded such that the budget is met; of a picture there is one group. Newlines go first.

    ``variant="official"``: every group keeps ``int(share * n)`` tokens, which may be none, and some of the budget is left over.

    Parameters
    ----------
    layer : the input of this layer, counted from 0: the program looks at layer 10 of 32 and drops behind it.
    """

    name = "prunevid-select"
    summary = "of what stands still in a scene, and of every frame, the tokens the question attends to"
    paper = "arXiv 2412.16117"
    budget = "at_most"
    default_retain = 0.4
    needs_spans = True

    layer: float = 11

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``text_peak [B, K]``: the largest attention paid by text behind the pictures, over heads too."""
        return {"text_peak": question_peak(attention)}

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``text_peak [N, n]``, ``cells``, ``until``, ``count [N]`` -> the highest of every group."""
        valid, span = tokens.valid, torch.stack([tokens.cells[..., 0], tokens.until], dim=-1)
        # what has no cell is one more group, behind all others
        span = span.masked_fill(~tokens.celled[..., None], int(span.max()) + 1 if span.numel() else 0)
        _, group = span.flatten(0, 1).unique(dim=0, return_inverse=True)
        group = group.view(valid.shape).masked_fill(~valid, -1)
        groups = int(group.max()) + 1 if group.numel() else 0
        bare = group_sizes(group.masked_fill(tokens.celled, -1), groups).tolist()
        sizes = group_sizes(group, groups).tolist()
        kept = [self._shared(*row) for row in zip(count.tolist(), sizes, bare, strict=True)]
        wanted = torch.tensor(kept, device=valid.device).view(len(valid), groups)
        return Reduction(top_in_groups(tokens.signals["text_peak"], group, wanted), valid)

    def _shared(self, count: int, sizes: list[int], bare: list[int]) -> list[int]:
        """How many of every group stay, of ``sizes``, of which ``bare`` have no cell."""
        celled = [size - without for size, without in zip(sizes, bare, strict=True)]
        total = sum(celled)
        if count >= total or not self.official:
            kept = apportion(count, celled)
            spare = apportion(count - sum(kept), bare)
            return [a + b for a, b in zip(kept, spare, strict=True)]
        kept = [int(count / total * size) for size in celled]
        if count and not any(kept):
            kept[celled.index(max(celled))] = 1
        return kept
