"""Frames of a vision tower that are computed whole, and frames that reuse parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import MmaccelError
from ...method import ReuseMethod
from ...method.refused import described, refuse
from ..call.compact_tokens import Subsequence


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames of a run, whose tokens are counted in one flat sequence.

    count : of frames. whole : the tokens of those that are computed whole.
    groups : of each size of other frames their tokens ``[N, T]`` long, and the slots of their references' in ``whole``.
    """

    count: int
    whole: Subsequence
    groups: Sequence[tuple[Tensor, Tensor]]

    @staticmethod
    def of(method: ReuseMethod, clips: Sequence[Sequence[int]], device: torch.device) -> Frames | None:
        """The frames of ``clips``, given the tokens of every frame of each; None if all frames are computed whole."""
        whole: list[Tensor] = []
        others: dict[int, list[tuple[Tensor, Tensor]]] = {}
        start = kept = 0
        for sizes in clips:
            references, places = method.references(len(sizes)), dict[int, Tensor]()
            numbers = isinstance(references, Sequence) and all(type(at) is int for at in references)
            if not numbers or len(references) != len(sizes):
                refuse(method, "references()", described(references), f"a list of {len(sizes)} frames, by number")
            if any(not 0 <= at <= frame or references[at] != at for frame, at in enumerate(references)):
                raise MmaccelError(
                    f"Method {method.name!r} must refer every frame to itself or to an earlier one that refers to itself."
                )
            for frame, (size, at) in enumerate(zip(sizes, references, strict=True)):
                tokens = torch.arange(start, start + size)
                start += size
                if at == frame:
                    places[frame] = torch.arange(kept, kept + size)
                    whole.append(tokens)
                    kept += size
                else:
                    others.setdefault(size, []).append((tokens, places[at]))
        if not others:
            return None
        groups = [
            (torch.stack([tokens for tokens, _ in pairs]).to(device), torch.stack([at for _, at in pairs]).to(device))
            for pairs in others.values()
        ]
        return Frames(sum(map(len, clips)), Subsequence(torch.cat(whole).to(device)), groups)
