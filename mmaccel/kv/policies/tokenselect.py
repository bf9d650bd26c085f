"""TokenSelect: single keys are read that the heads of a layer vote for, the same for all heads."""

import torch
from mmaccel_kernels.alike import keep_alike
from mmaccel_kernels.votes import votes as votes_of
from torch import Tensor

from ...method import ReadingPolicy, ReadStep, register
from ...method.sparse_read import Picked, best


@register
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
    prefill : with ``chunk``, every chunk of a prompt reads as many visual keys of earlier chunks as a decode step does, those
        with most votes by the mean of its queries. A chunk chooses anew whatever ``alike`` is.
    interleaved : pair query head ``h`` with KV head ``h % Hkv`` to vote, as the program does, which is right for ``Hkv = Hq``.
    """

    name = "tokenselect"
    summary = "every decode step reads the visual keys that all heads of a layer vote for"
    paper = "arXiv 2411.02886"
    #: all heads vote
    mixes_heads = True
    default_retain = 0.2
    limits = {"pool": "odd or 0"}

    alike: float = 0.9
    pool: int = 0
    prefill: bool = False
    interleaved: bool = False

    @property
    def by_piece(self) -> bool:
        """As ``prefill`` says."""
        return self.prefill

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, 1, P]`` float32: the votes of all heads; ``[B, Hkv, P]`` where heads store different keys."""
        votes = votes_of(step.query, step.keys, step.slots[..., 0], self.interleaved)
        if self.pool:
            # what is not there is not the best of any
            votes = votes.masked_fill(step.gone, -torch.inf)
            votes = torch.nn.functional.max_pool1d(votes, self.pool, stride=1, padding=self.pool // 2)
        return votes

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """Choose the best keys; reuse the choice of an earlier step in rows whose query is like its query."""
        picked = best(self.rate(step), step)
        if not step.carried:
            query = torch.nn.functional.normalize(step.query.flatten(1).float())
            return picked, {"query": query, "picked": picked.units}
        before, units = step.carried["query"], step.carried["picked"]
        query, units = keep_alike(step.query, picked.units, before, units, self.alike)
        return picked._replace(units=units), {"query": query, "picked": units}
