"""StreamMem: keys that the words before an answer attend to, and a mean key for every frame."""

import torch
from torch import Tensor

from ...core.reduction import top_mask
from ...method import register
from ...method.guides import Fold, GuidedPolicy, RatedKeys


@register
class StreamMem(GuidedPolicy):
    """A bounded memory of a stream that does not depend on questions.

    *StreamMem: Query-Agnostic KV Cache Memory for Streaming Video Understanding*, arXiv 2508.15717.

    What the chat template writes between a question and its answer is read behind the cache. The score of a key is the
    attention that it pays to it, mean over heads and its tokens. Of every frame that loses keys, one slot of the budget holds
    the mean of all its keys, each weighted with its score and turned to the position of that slot, and of their values.

    In a :class:`~mmaccel.VideoSession` old and new keys compete whenever a layer holds more than ``cap_tokens`` keys a head.
    No program was published, and what the paper leaves open is ours: means count in the budget, and stand in the place of the
    newest evicted key of their frame. Near copies among neighbouring frames are not merged before the tower, and positions are
    not stretched.

    Parameters
    ----------
    proxy : the text that is read; by default that of the chat template. Where there is none, and without a processor, the
        question of the prompt.
    prototypes : share of the budget that means may take, those of the frames with the highest score of any key first. 0.5 is
        our choice.
    """

    name = "streammem"
    summary = "streams: keys that the words before an answer attend to, and a mean for every frame; needs no question"
    paper = "arXiv 2508.15717"
    default_retain = 0.25
    limits = {"prototypes": "[0, 1]"}

    proxy: str = ""
    prototypes: float = 0.5

    def guides(self, template: str) -> tuple[str, ...]:
        return (self.proxy or template,)

    def fold(self, keys: RatedKeys) -> Fold | None:
        weight = keys.paid.clamp(min=1e-12)
        of_frame = keys.compete & (keys.frame >= 0)
        # frames are numbered in their order, so that no more numbers are needed than there are keys
        begins = of_frame & (keys.frame != _before(keys.frame, of_frame))
        number = (begins.cumsum(1) - 1).clamp(min=0)
        free = (keys.count - (keys.compete & (keys.scores == torch.inf)).sum(1)).clamp(min=0)
        most = (free * self.prototypes).long().minimum(begins.sum(1))
        stay = top_mask(keys.scores, keys.compete, keys.count - most)
        gone = of_frame & ~stay & (keys.compete.sum(1) > keys.count)[:, None]
        best = torch.zeros_like(weight).scatter_reduce(1, number, weight.masked_fill(~of_frame, 0.0), "amax")
        slot = torch.arange(gone.shape[1], device=gone.device).expand_as(gone)
        newest = torch.full_like(slot, -1).scatter_reduce(1, number, torch.where(gone, slot, -1), "amax")
        chosen = top_mask(best, newest >= 0, most)
        onto = torch.where(chosen, newest, -1).gather(1, number).masked_fill(~of_frame, -1)
        return Fold(onto, weight)


def _before(frame: Tensor, of_frame: Tensor) -> Tensor:
    """``[B, n]`` long: the frame of the last key of any frame before each; -1 before the first."""
    slot = torch.arange(frame.shape[1], device=frame.device).expand_as(frame)
    last = torch.where(of_frame, slot, -1).cummax(1).values.roll(1, dims=1)
    last[:, 0] = -1
    return torch.where(last < 0, -1, frame.gather(1, last.clamp(min=0)))
