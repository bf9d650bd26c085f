"""STC's pruner: of every frame of a stream the tokens unlike the frame and unlike what was seen so far stay."""

import torch
from mmaccel_kernels.copies import of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import top_in_groups
from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import frame_numbers
from .film import share, spare_newlines
from .vidcom2 import copies_in, nearness, part_means, quiet_channels


@register
class StcPruner(ProjectorMethod):
    """Keep equally many tokens of every frame, those far from the frame's mean and from the memory of the stream.

    *Accelerating Streaming Video Large Language Models via Hierarchical Token Compression*, arXiv 2512.00891; its pruner.

    A clip is read in chunks of ``frames`` frames. Half of the channels are looked at, those of lowest variance in the first
    chunk, so that means can be compared. The memory of a
    chunk is the mean of the means of all chunks up to it, as a unit vector; tokens ``x`` are unit vectors too. Of every
    frame the tokens with the smallest ``g(x, mean of the frame) + g(x, memory)`` stay, ``g`` as in ``vidcom2``, the lower
    slot on a tie. No later frame is looked at, so the choice can be made while the frames come in.

    The budget is exact over the clip and apportioned to frames by size; if it has less than a token a frame, neighbouring
    frames are one. The authors keep 60 of 196 tokens. Tiles of a picture count as frames. Newlines are dropped first.

    Parameters
    ----------
    frames : frames a chunk, 1 as in the program.

    Paper and program: the program keeps its memory for as long as it runs; here it begins with the clip. It computes a score
    against the whole chunk too, which it does not use.

    ``variant="official"``: channels are those of every chunk anew, so that the memory mixes channels.
    """

    name = "stc-pruner"
    summary = "tokens unlike their frame and unlike what the stream showed before"
    paper = "arXiv 2512.00891"
    unit = "picture"
    limits = {"frames": "[1, inf)"}

    frames: int = 1

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the most unusual tokens of every frame."""
        here, frame = tokens.celled, frame_numbers(tokens)
        frames = max(1, int(frame.max()) + 1)
        chunk = self.chunks(frame)
        chunks = max(1, int(chunk.max()) + 1)
        seen = self._seen(tokens.features, chunk, chunks).masked_fill(~here[..., None], 0.0)
        means = part_means(seen, chunk, chunks)
        number = torch.arange(1, chunks + 1, device=seen.device)[:, None]
        memory = normalize(means.cumsum(1) / number, dim=-1)
        x = normalize(seen, dim=-1)
        near = nearness(x, part_means(x, frame, frames), frame) + nearness(x, memory, chunk)
        near = of_first(near, copies_in(seen, frame))
        part, kept = share(frame, count)
        return Reduction(top_in_groups(-near, part, kept) | spare_newlines(tokens, count), tokens.valid)

    def chunks(self, frame: Tensor) -> Tensor:
        """``[N, n]`` long: the chunk of the frame ``frame [N, n]`` of every token; -1 of none."""
        return torch.where(frame < 0, -1, frame // self.frames)

    def _seen(self, features: Tensor, chunk: Tensor, chunks: int) -> Tensor:
        """``[N, n, D // 2]`` float32: the channels that are looked at."""
        if self.official:
            own, row = quiet_channels(features, chunk, chunks), torch.arange(len(chunk), device=chunk.device)[:, None]
            return features.gather(2, own[row, chunk.clamp(min=0)]).float()
        first = quiet_channels(features, chunk.masked_fill(chunk > 0, -1), 1)
        return features.gather(2, first.expand(*chunk.shape, -1)).float()
