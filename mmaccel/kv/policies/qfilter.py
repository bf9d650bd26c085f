"""Q-Filters: keep the keys along the direction in which the queries lie."""

import torch
from torch import Tensor

from ...method import KeyBatch, register
from ...method.calibration import CalibratedPolicy
from ..scoring.copies import of_first_keys


@register
class QFilter(CalibratedPolicy):
    """Score keys by their product with the main direction of the queries of their head.

    *Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression*, arXiv 2503.02812.

    ``s_k = -f . k``, with ``f`` the first right singular vector of the queries of the query heads of a key head, turned so that
    the queries' mean product with it is negative.

    Parameters
    ----------
    calibration : str, a file that ``mmaccel calibrate`` wrote: ``f`` is then that of the queries of its samples, as the authors
        have it, once for a model. By default (empty) ``f`` is that of the prompt itself.
    window : int, how many of the prompt's last queries ``f`` is made of without a file.
    """

    name = "qfilter"
    summary = "keys along the main direction of the prompt's last queries"
    paper = "arXiv 2503.02812"
    default_retain = 0.25
    limits = {"window": "[1, inf)"}

    uses = ("filters",)
    optional = True

    calibration: str = ""
    window: int = 128

    @property
    def by_layer(self) -> bool:  # type: ignore[override]
        """Whether it has a file, whose filters differ between layers."""
        return bool(self.calibration)

    def score(self, keys: KeyBatch) -> Tensor:
        score = -(keys.keys.float() @ self.filters(keys)[..., None])[..., 0]
        return of_first_keys(score, keys.keys, keys.valid)

    def filters(self, keys: KeyBatch) -> Tensor:
        """``[B or 1, Hkv, D]`` float32, one direction for each key head."""
        if self.calibration:
            given = self.on_device("filters", keys.keys.device)[keys.layer]
            # where heads store different keys each of them is a row
            alone = keys.keys.shape[1] == 1
            return given.repeat(len(keys.keys) // len(given), 1)[:, None] if alone else given[None]
        asked = (keys.places >= 0)[:, None, None, :, None]
        queries = keys.queries.float().unflatten(1, (keys.keys.shape[1], -1)).masked_fill(~asked, 0.0).flatten(2, 3)
        return main_direction(queries.mT @ queries, queries.sum(2))


def main_direction(products: Tensor, total: Tensor) -> Tensor:
    """The main direction of queries ``[..., D]``, turned so that their mean product with it is negative, from the sums of their
    outer ``products [..., D, D]`` and of the queries, ``total [..., D]``."""
    main = torch.linalg.eigh(products).eigenvectors[..., -1]
    side = (total * main).sum(-1, keepdim=True)
    return torch.where(side > 0, -main, main)
