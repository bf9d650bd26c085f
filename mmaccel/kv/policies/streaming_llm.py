"""StreamingLLM: keep the first few keys and the newest."""

import torch
from torch import Tensor

from ...method import KeyBatch, Policy, register


@register
class StreamingLLM(Policy):
    """Attention sinks and recency: the first ``sinks`` keys and the newest of the others stay.

    *Efficient Streaming Language Models with Attention Sinks*, ICLR 2024, arXiv 2309.17453.

    The score of a key is its place in the prompt, the same for all heads; queries are not needed. The early part of pictures
    is evicted first, so it is a weak baseline for visual tokens.

    Parameters
    ----------
    sinks : keys at the start of the prompt that stay. 4 as in the paper.

    Paper and program: the program evicts at every step, from text too (here ``every=1, joint=True``; ``every=16`` in the recipe
    ``streaming-llm-decode``), and rotates the kept keys anew, so that positions count cache slots and the text can grow without
    limit. Here keys keep their positions.
    """

    name = "streaming-llm"
    summary = "attention sinks and the newest keys (baseline)"
    paper = "arXiv 2309.17453"
    default_retain = 0.25

    sinks: int = 4

    def score(self, keys: KeyBatch) -> Tensor:
        score = keys.index.float()
        score = score.masked_fill(keys.valid.cumsum(1) <= self.sinks, torch.inf).masked_fill(~keys.valid, -torch.inf)
        return score[:, None].expand(-1, keys.keys.shape[1], -1)
