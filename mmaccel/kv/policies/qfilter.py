"""Q-Filters: keep the keys along the direction in which the queries lie."""

import torch
from torch import Tensor

from ...method import KeyBatch, Policy, register
from ..scoring.copies import of_first_keys


@register
class QFilter(Policy):
    """Score keys by their product with the main direction of the queries of their head.

    *Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression*, arXiv 2503.02812.

    ``s_k = -f . k``, with ``f`` the first right singular vector of the queries of the query heads of a key head, turned so that
    the queries' mean product with it is negative.

    Parameters
    ----------
    window : how many of the prompt's last queries ``f`` is made of.

    The authors calibrate ``f`` on a corpus, once for a model; here it is that of the prompt itself.
    """

    name = "qfilter"
    summary = "keys along the main direction of the prompt's last queries"
    paper = "arXiv 2503.02812"
    default_retain = 0.25
    limits = {"window": "[1, inf)"}

    window: int = 128

    def score(self, keys: KeyBatch) -> Tensor:
        score = -(keys.keys.float() @ self.filters(keys)[..., None])[..., 0]
        return of_first_keys(score, keys.keys, keys.valid)

    def filters(self, keys: KeyBatch) -> Tensor:
        """``[B, Hkv, D]`` float32, one direction for each key head."""
        asked = (keys.places >= 0)[:, None, None, :, None]
        queries = keys.queries.float().unflatten(1, (keys.keys.shape[1], -1)).masked_fill(~asked, 0.0).flatten(2, 3)
        main = torch.linalg.eigh(queries.mT @ queries).eigenvectors[..., -1]
        side = (queries.sum(2) * main).sum(-1, keepdim=True)
        return torch.where(side > 0, -main, main)
