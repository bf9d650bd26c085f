"""Positions of a reduced prompt, which are those of the unreduced one.

A prompt's positions are known when its request arrives, but for those of the visual tokens that stay: which they are is known
once the picture is encoded. Until then a placeholder holds ``-1 - base``, where ``base`` is the position at which its picture
begins; a row of the encoder brings how far behind that its token stands, and what is behind the picture. What is filled in
gives the base again, so that a prompt may come in chunks, and again after it was preempted. One column more than the prompt is
long holds the position of the first token that is generated, which does not depend on what stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Range of a picture or clip in a prompt.

    start : of its range in the reduced prompt.
    visual : ``[length]`` bool, which tokens of that range are placeholders.
    tokens, whole : of its range in the unreduced prompt the tokens, and which of them, with the text between them, become
        placeholders. Other text is the same in both ranges.
    """

    start: int
    visual: Tensor
    tokens: list[int]
    whole: Tensor

    @property
    def stop(self) -> int:
        """The end of its range in the reduced prompt."""
        return self.start + len(self.visual)

    @staticmethod
    def of_one_run(start: int, tokens: list[int], visual: Tensor, before: int) -> Place:
        """Position of a picture whose one run of placeholders, in the ``tokens`` of the reduced range, was ``before`` long."""
        last = int(visual.nonzero()[-1]) + 1
        more = before - int(visual.sum())
        return Place(
            start,
            visual,
            tokens[:last] + [tokens[last - 1]] * more + tokens[last:],
            torch.cat([visual[:last], visual.new_ones(more), visual[last:]]),
        )

    @staticmethod
    def of_text_between(start: int, tokens: list[int], visual: Tensor, inside: list[int]) -> Place:
        """Position of a picture whose tokens ``inside``, with text between placeholders, became one run of placeholders in the
        ``tokens`` of the reduced range."""
        first, stop = int(visual.nonzero()[0]), int(visual.nonzero()[-1]) + 1
        whole = torch.cat([visual.new_zeros(first), visual.new_ones(len(inside)), visual.new_zeros(len(tokens) - stop)])
        return Place(start, visual, tokens[:first] + inside + tokens[stop:], whole)


def expanded(tokens: list[int], places: list[Place]) -> tuple[list[int], list[int]]:
    """The tokens of the unreduced prompt, and where each of ``places`` (in order) starts in it."""
    whole: list[int] = []
    starts, done = [], 0
    for place in places:
        whole += tokens[done : place.start]
        starts.append(len(whole))
        whole += place.tokens
        done = place.stop
    return whole + tokens[done:], starts


def provisional(whole: Tensor, places: list[Place], starts: list[int], earlier: list[int]) -> Tensor:
    """Positions ``[3, n + 1]`` of the reduced prompt and of the token behind it, with placeholders as the module says.

    whole : ``[3, N]`` long, those of the unreduced prompt, in which the pictures at ``places`` begin at ``starts``.
    earlier : number of positions by which the tokens behind each picture stand before those of ``whole``.
    """
    parts, done, moved = [], 0, 0
    for place, start, less in zip(places, starts, earlier, strict=True):
        parts.append(whole[:, done:start] - moved)
        done = start + len(place.whole)
        mine = whole[:, start:done] - moved
        here = mine.new_empty(len(mine), len(place.visual))
        here[:, place.visual] = -1 - mine[0, place.whole][0]
        here[:, ~place.visual] = mine[:, ~place.whole] if not bool(place.visual.all()) else here[:, ~place.visual]
        parts.append(here)
        moved += less
    parts.append(whole[:, done:] - moved)
    return torch.cat([*parts, whole.new_full((len(whole), 1), int(whole.max()) + 1 - moved)], dim=1)


def filled_in(positions: Tensor, visual: Tensor, start: int, offsets: Tensor) -> tuple[Tensor, int]:
    """``positions [3, N]`` with those of the placeholders ``visual [n]`` bool from ``start`` on, as many as ``offsets [4, k]``,
    which say how far each stands behind the beginning of its picture, and how far what is behind that picture; with the
    position of what is behind the last."""
    at = visual[start:].nonzero()[: offsets.shape[1], 0] + start
    given = positions[0, at]
    base = torch.where(given < 0, -1 - given, given - offsets[0])
    filled = positions.clone()
    filled[:, at] = base + offsets[:3]
    return filled, int(base[-1] + offsets[3, -1])
