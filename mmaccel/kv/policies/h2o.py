"""H2O: keep the heavy hitters, the keys that have received most attention so far."""

from typing import Literal

from torch import Tensor

from ...method import KeyBatch, LayerAttention, Policy, register
from ..scoring.importance import by_group, column_sums


@register
class H2O(Policy):
    """Score keys by the attention received from all queries.

    *H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models*, NeurIPS 2023, arXiv 2306.14048.

    ``s_k = sum_q A[h, q, k]``, reduced over the query heads of a key head. With ``every=1`` each decode step adds its row
    and the key of lowest score is evicted, as in the paper; the recipes ``h2o-decode`` and ``d2o`` do so after every 16 steps,
    which costs next to nothing. With ``text_retain`` or ``joint`` text keys are evicted too, and
    ``recent`` keeps the newest keys (half of the budget in the paper). The sums are computed over blocks of queries; no map
    is kept.

    Parameters
    ----------
    gqa : how the query heads of one key head are reduced. The authors' models have no GQA; ``mean`` as in kvpress.

    A causal sum favours early keys, to which more queries can attend; the paper does not correct for that
    (``observed-attention`` does).
    """

    name = "h2o"
    summary = "keys that all queries together attend to most"
    paper = "arXiv 2306.14048"
    default_retain = 0.25

    gqa: Literal["mean", "max", "sum"] = "mean"

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        return before + by_group(column_sums(attention), before.shape[1], self.gqa)

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.received is not None
        return keys.received
