"""Base of recall: frames of a stream that left the device are found again when a question is asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import MmaccelError
from .keys import KeyBatch, Policy

#: the tensors that a frame's keys or values are parked as
Packed = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class RecallPolicy(Policy):
    """A policy that rates the frames of a video by a question.

    In a :class:`~mmaccel.VideoSession` with ``recall=`` the oldest frames beyond the cap are parked in host memory or on disk,
    and :meth:`choose` says which of them every layer reads for a question. In any other call nothing is parked: the visual keys
    of the frames that the end of the prompt rates highest stay, by keys with RoPE.

    Parameters
    ----------
    frames : how many parked frames each layer reads for one question.
    window : in a call without a session, how many of the prompt's last queries rate the frames.
    contiguous : recalled frames stand directly before the newest ones, at positions behind each other, and the beginning of the
        prompt before them, so that a stream never ends. False leaves all positions as they were.
    while_reading : every stretch of new frames recalls earlier ones, too.
    """

    #: whether frames are rated by keys and queries without RoPE
    unrotated: ClassVar[bool] = True
    #: whether all layers of a session read the same frames: the question is read once to rate them, and once more with them
    together: ClassVar[bool] = False
    #: whether :meth:`summarise` is given the attention that keys received
    weighs: ClassVar[bool] = False
    shared = True
    excludes = {
        "cache": "a recipe has at most one method at site 'cache'",
        "codec": "frames are parked as they are stored, which a codec changes",
    }
    limits = {"frames": "[1, inf)", "window": "[1, inf)"}

    frames: int = 64
    window: int = 32
    contiguous: bool = True
    while_reading: bool = False

    def _check_rest(self) -> None:
        """Refuse ``rest``: frames are parked as they are stored."""
        raise MmaccelError(
            f"{self.name} parks frames as they are stored, which rest={self.rest!r} changes; leave out rest."
        )

    @abstractmethod
    def rate(self, query: Tensor, frames: Tensor) -> Tensor:
        """``[F]`` float32: frames of higher rating are read first.

        Parameters
        ----------
        query : ``[Hq, q, D]`` float32, the question's queries in one layer.
        frames : ``[F, Hkv, E]`` float32, what :meth:`summarise` returned for every frame there, in the order of the video.
        """

    @property
    def distance(self) -> int:
        """Distance of a question's queries from all frames, in positions, when they are compared with keys without RoPE."""
        return 0

    def summarise(self, keys: Tensor, frame: Tensor, count: int, received: Tensor | None = None) -> Tensor:
        """``[count, Hkv, E]``: a summary of the ``keys [Hkv, n, D]`` float32 of each frame, key i being of ``frame[i]``; by
        default their mean. ``received [Hq, n]`` float32 is the attention that each query head paid to them while they were
        read, summed over its queries; None unless the policy :attr:`weighs` keys."""
        return frame_means(keys, frame, count)

    def common(self, ratings: Sequence[Tensor]) -> Tensor:
        """``[n]`` long, ascending: the frames that all layers read, where they do so :attr:`together`, by what :meth:`rate`
        returned in each layer. By default a frame counts as much as in the layer in which it stands out most."""
        apart = [(rating - rating.mean()) / rating.std(correction=0).clamp(min=1e-9) for rating in ratings]
        return best(torch.stack(apart).amax(0), self.frames)

    def choose(self, query: Tensor, frames: Tensor) -> Tensor:
        """``[n]`` long, ascending: the frames that are read, at most :attr:`frames`; arguments as of :meth:`rate`. By default
        those of the highest rating, of equal ones the first."""
        return best(self.rate(query, frames), self.frames)

    def pack(self, x: Tensor) -> Packed:
        """The tensors that keys or values ``[Hkv, n, D]`` of one frame are parked as; by default themselves."""
        return (x,)

    def unpack(self, packed: Packed, count: int) -> Tensor:
        """``[Hkv, count, D]``, what :meth:`pack` was given, as nearly as it kept it."""
        return packed[0]

    def score(self, keys: KeyBatch) -> Tensor:
        """Every visual key has the rating of its frame."""
        out = torch.zeros(keys.keys.shape[:3], device=keys.keys.device)
        if keys.picture is None or keys.cells is None:
            return out
        for row, visual in enumerate(keys.visual & keys.valid):
            at = visual.nonzero()[:, 0]
            if not len(at):
                continue
            named = torch.stack([keys.picture[row, at], keys.cells[row, at, 0]], dim=1)
            found, frame = named.unique(dim=0, return_inverse=True)
            asking = keys.queries[row][:, keys.places[row] >= 0].float()
            shown, received = keys.keys[row][:, at].float(), None
            if self.weighs:
                every = keys.keys[row].float().masked_fill(~keys.valid[row, None, :, None], 0.0)
                logits = by_query_head_logits(asking, every) * keys.scaling
                received = logits.masked_fill(~keys.valid[row], -torch.inf).softmax(-1).sum(1)[:, at]
            rating = self.rate(asking, self.summarise(shown, frame, len(found), received))
            out[row, :, at] = rating[frame]
        return out


def frame_means(keys: Tensor, frame: Tensor, count: int) -> Tensor:
    """``[count, Hkv, D]``: the mean of the ``keys [Hkv, n, D]`` of each frame, key i being of ``frame[i]``; 0 without any."""
    member = (frame == torch.arange(count, device=frame.device)[:, None]).to(keys)
    return torch.einsum("fn,hnd->fhd", member / member.sum(1, keepdim=True).clamp(min=1), keys)


def by_query_head(frames: Tensor, heads: int) -> Tensor:
    """``[F, Hkv, D]`` -> ``[F, heads D]``: the key of each of so many query heads, side by side."""
    return frames.repeat_interleave(heads // frames.shape[1], dim=1).flatten(1)


def by_query_head_logits(query: Tensor, keys: Tensor) -> Tensor:
    """``[Hq, q, n]``: products of ``query [Hq, q, D]`` and ``keys [Hkv, n, D]`` of the head that each reads."""
    return (
        (query.unflatten(0, (len(keys), -1)).flatten(1, 2) @ keys.mT).unflatten(1, (-1, query.shape[1])).flatten(0, 1)
    )


def best(ratings: Tensor, count: int) -> Tensor:
    """``[n]`` long, ascending: at most ``count`` frames of the highest ``ratings [F]``, of equal ones the first."""
    return ratings.argsort(descending=True, stable=True)[:count].sort().values
