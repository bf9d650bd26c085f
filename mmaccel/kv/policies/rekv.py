"""ReKV: a question recalls the frames whose mean key has the largest product with it."""

import torch
from torch import Tensor

from ...method import RecallPolicy, register
from ...method.recall import best, by_query_head


@register
class ReKV(RecallPolicy):
    """Frames beyond the window of a stream are parked, and a question recalls those with the most similar mean key.

    *ReKV: Streaming Video Question-Answering with In-context Video KV-Cache Retrieval*, ICLR 2025, arXiv 2503.00540.

    The rating of a frame in a layer is ``<mean_q q, mean_k k>`` over the question's tokens, the frame's keys, and all query
    heads side by side, both without RoPE. Every layer reads the best frames, at positions behind each other.

    Parameters
    ----------
    frames : as in the program, which calls it ``topk``.
    run : consecutive frames that are rated and read together, by the mean of their ratings; the last run may be shorter.
        1 as in the program, which calls it ``chunk_size``.

    Paper and program: both call the product a cosine, and the program normalises nothing; so does this.
    """

    name = "rekv"
    summary = "frames whose mean key has the largest product with the question"
    paper = "arXiv 2503.00540"
    default_retain = 0.25
    limits = {"run": "[1, inf)"}

    run: int = 1

    def rate(self, query: Tensor, frames: Tensor) -> Tensor:
        return self._runs(by_query_head(frames, len(query)) @ query.mean(1).flatten()).repeat_interleave(self.run)[
            : len(frames)
        ]

    def choose(self, query: Tensor, frames: Tensor) -> Tensor:
        """The best runs, as many as hold ``frames`` frames when none is shorter."""
        if self.run == 1:
            return super().choose(query, frames)
        ratings = self.rate(query, frames)[:: self.run]
        chosen = best(ratings, max(1, self.frames // self.run))[:, None] * self.run + torch.arange(self.run)
        return chosen[chosen < len(frames)]

    def _runs(self, ratings: Tensor) -> Tensor:
        """``[F]`` -> ``[runs]``, means."""
        return torch.stack([run.mean() for run in ratings.split(self.run)])
