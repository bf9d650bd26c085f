"""TokenSelect: single keys are read that the heads of a layer vote for, the same for all heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import MmaccelError
from ...method import ReadingPolicy, ReadStep
from ...method.reading import Picked, best, by_kv_head
from ...method.registry import register


@register
@dataclass(frozen=True)
class TokenSelect(ReadingPolicy):
    """Every decode step reads the visual keys that get most votes of all heads; all keys stay stored.

    *TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic Token-Level KV Cache
    Selection*, arXiv 2411.02886.

    Every query head distributes one vote over the visual keys: the softmax of its products with them, unscaled. Keys with most
    votes are read by all heads. While the query of a layer is like the one that last chose there (cosine over all heads), what
    that one chose is read again. Text is always read; where the sinks and the newest keys that the authors always read (128
    and 512) may be visual, say so with ``sinks`` and ``recent``. Heads that store different keys, as other recipes
    leave them, vote each KV head for itself.

    Parameters
    ----------
    alike : the cosine from which the choice of an earlier step stands; above 1 every step chooses anew.
    pool : an odd number of neighbouring keys, each of which counts as the best of them; 0 for none.
    interleaved : pair query head ``h`` with KV head ``h % Hkv`` to vote, as the program does, which is right for ``Hkv = Hq``.
    """

    name = "tokenselect"
    summary = "every decode step reads the visual keys that all heads of a layer vote for"
    paper = "arXiv 2411.02886"
    default_retain = 0.2

    alike: float = 0.9
    pool: int = 0
    interleaved: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < 0 or (self.pool and self.pool % 2 == 0):
            raise MmaccelError(f"tokenselect: pool={self.pool} has no key in the middle; give an odd number, or 0.")

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, 1, P]`` float32: the votes of all heads; ``[B, Hkv, P]`` where heads store different keys."""
        heads = step.keys.shape[1]
        query = (
            step.query.unflatten(1, (-1, heads)).transpose(1, 2) if self.interleaved else by_kv_head(step.query, heads)
        )
        logits = torch.einsum("bkgd,bkld->bkgl", query.float(), step.keys.float())
        at = step.slots[..., 0].long() if step.all_there else step.slots[..., 0].clamp(min=0).long()
        logits = logits.gather(3, at.expand(-1, heads, -1)[:, :, None].expand(-1, -1, query.shape[2], -1))
        if not step.all_there:
            logits = logits.masked_fill(step.gone[:, :, None], -torch.inf)
        votes = logits.softmax(-1).sum((1, 2) if step.slots.shape[1] == 1 else 2).view(*step.gone.shape)
        if self.pool:
            # what is not there is not the best of any
            votes = votes.masked_fill(step.gone, -torch.inf)
            votes = torch.nn.functional.max_pool1d(votes, self.pool, stride=1, padding=self.pool // 2)
        return votes

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """What an earlier step chose, in rows whose query is like its query, else the best."""
        picked, query = best(self.rate(step), step), torch.nn.functional.normalize(step.query.flatten(1).float())
        if step.carried:
            before = step.carried["query"]
            same = (query * before).sum(1, keepdim=True) >= self.alike
            picked = picked._replace(units=torch.where(same[..., None], step.carried["picked"], picked.units))
            query = torch.where(same, before, query)
        return picked, {"query": query, "picked": picked.units}
