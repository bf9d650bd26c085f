"""METok before the language model: a clip in events, of which those that the question asks for are pooled least."""

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import group_sizes
from ..core.reduction import Reduction, segment_sum
from ..method import QuestionGuided, TokenBatch, register
from ..method.blocks import frame_numbers
from ..method.question import question_direction
from .pool import pool_by
from .segments import changing_segments

#: a stride is half as long, so a frame has four times the tokens
FINER = 4


@register
class METokMerge(QuestionGuided):
    """Events by where frames change, and pooling by what the question asks for.

    *METok: Multi-Stage Event-based Token Compression for Efficient Long Video Understanding*, EMNLP 2025,
    arXiv 2506.02850; its first stage. (The recipe ``metok`` has all three.)

    A frame is the mean of its tokens. The clip is cut behind the ``events - 1`` frames that are least like the next one, by
    cosine. A frame's relevance is its cosine with the question, an event's that of its best frame. The ``key`` most
    relevant events are key events, and in every event the ``fine`` most relevant frames are fine. All frames are
    average-pooled: a fine frame of a key event has four times the tokens of another one of it and of a fine frame of
    another event, and these have four times those of what is left, as far as the budget and whole windows allow. Later
    stages are shown the events.

    Frames and question are those that the language model reads; with ``clip`` those of a CLIP model, as in the paper. Without
    a question all frames are equally relevant. Tiles of a picture count as frames. Newlines are dropped.

    Parameters
    ----------
    events, key, fine : 5, 3 and 6 as in the program.
    clip : the CLIP model that the vision tower comes from, see ``cdpruner``; ``accelerate_vlm`` then needs ``processor=``.

    Paper and program: strides are 2 and 4 in a key event and 4 and 8 in others, by bilinear interpolation; here the budget
    decides the windows, in the same proportions, and a window is averaged. The paper speaks of shares where the program
    counts events and frames. The program asks SigLIP, and puts a newline behind every event, which is not offered here.
    """

    name = "metok-merge"
    summary = "a clip cut into events; events and frames that the question asks for are pooled least"
    paper = "arXiv 2506.02850"
    unit = "picture"
    budget = "at_most"
    default_retain = 0.42
    limits = {"events": "[1, inf)", "key": "[1, inf)", "fine": "[1, inf)"}

    events: int = 5
    key: int = 3
    fine: int = 6
    clip: str | None = None

    def marks(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """``event``, ``key_event`` and ``fine_frame [N, n]`` float32: the number of the event of each token, and 1 or 0; NaN
        without a cell."""
        frame = frame_numbers(tokens)
        marks = torch.full((3, *frame.shape), torch.nan, device=frame.device)
        space = self.space(tokens)
        for row in range(len(frame)):
            slots = (frame[row] >= 0).nonzero()[:, 0]
            if not len(slots):
                continue
            number = frame[row, slots]
            order, sizes = number.argsort(stable=True), torch.bincount(number)
            at = slots[order]
            means = segment_sum(tokens.features[row, at].float(), sizes) / sizes[:, None]
            seen = segment_sum(space[row, at].float(), sizes) / sizes[:, None] if self.clip else means
            figures = self.frames(means, self.relevance(seen, tokens, row))
            marks[:, row, slots] = figures[:, number]
        return dict(zip(("event", "key_event", "fine_frame"), marks, strict=True))

    def relevance(self, seen: Tensor, tokens: TokenBatch, row: int) -> Tensor:
        """``[T]``: the cosine of every frame ``seen [T, d]`` of a unit with its question."""
        said = question_direction(tokens, row)
        if said is None:
            return torch.zeros(len(seen), device=seen.device)
        return torch.cosine_similarity(seen, said[None], dim=-1)

    def frames(self, means: Tensor, relevance: Tensor) -> Tensor:
        """``[3, T]``: of frames ``means [T, D]`` with ``relevance [T]`` the event, whether it is key, and whether the frame is
        fine."""
        wanted = relevance.tolist()
        events = [range(first, last + 1) for first, last in changing_segments(means, self.events - 1, -2.0)]
        best = sorted(range(len(events)), key=lambda e: (-max(wanted[t] for t in events[e]), e))[: self.key]
        rows = []
        for number, event in enumerate(events):
            fine = sorted(event, key=lambda t: (-wanted[t], t))[: self.fine]
            rows += [(number, number in best, t in fine) for t in event]
        return torch.tensor(rows, dtype=torch.float32, device=means.device).T

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``event``, ``key_event``, ``fine_frame [N, n]``, ``count [N]`` -> windows of every frame, averaged."""
        frame = frame_numbers(tokens)
        marks = tokens.signals if "event" in tokens.signals else self.marks(tokens)
        finer = (marks["key_event"].nan_to_num(0.0) + marks["fine_frame"].nan_to_num(0.0)).long()
        sizes = group_sizes(frame, max(1, int(frame.max()) + 1 if frame.numel() else 1))
        # the same for all tokens of a frame
        power = torch.zeros_like(sizes).scatter_reduce(1, frame.clamp(min=0), finer, "amax")
        rows = zip(count.tolist(), sizes.tolist(), (sizes * FINER**power).tolist(), strict=True)
        kept = [apportion(k, size, weight) for k, size, weight in rows]
        return pool_by(tokens, frame, torch.tensor(kept, device=sizes.device).view_as(sizes), count)
