"""Free Video-LLM: frames that the question asks for and some others in detail, where they show it; all of them pooled."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.reduction import Links, Reduction, segment_sum
from ..method import QuestionGuided, TokenBatch, register
from ..method.blocks import frame_numbers
from ..method.question import question_direction
from .film import Flat, joined
from .pool import window_grid
from .segments import changing_segments


@register
class FreeVideoLlm(QuestionGuided):
    """A slow, a middle and a fast path through a clip, guided by the question.

    *Free Video-LLM: Prompt-guided Visual Perception for Efficient Training-free Video LLMs*, arXiv 2410.10441.

    The slow path has the ``slow`` frames most like the question, the middle one ``middle`` frames at equal distances. Both
    show pairs of neighbours in a row as their mean, in a region with ``roi`` of the frame's area: its middle is the mean
    place of the share ``roi`` of pairs that are most like the question, rounded down, and it is moved inside the frame. The
    fast path has all frames, each average-pooled into the windows that ``pool`` would choose.

    The fast path gets ``fast`` of the budget and what the others leave over. Slow frames come first, the most like the question
    before others, then middle ones, as long as whole regions fit; a frame of both is shown once. A pair takes the slot of its
    first token, a window the first slot that no pair has, so that the paths are interleaved in order of time.

    A frame's likeness is the mean cosine of its tokens and the question, a pair's the cosine of the question and the larger of
    both tokens in each channel. Tokens and question are those that the language model reads; with ``clip`` those of a CLIP
    model, as in the paper. Without a question there are no slow frames, and regions are whole frames. A picture and each of
    its tiles is a frame. Newlines are dropped.

    ``variant="official"``: the region is found in the program's grid, which takes two rows of pairs for one of twice the
    length, where their number is even.

    Parameters
    ----------
    slow, middle, roi : 3, 5 and 0.8 as in the program.
    fast : 0.3, what 16 tokens of each of 50 frames are of the program's 2,648 tokens; with 0 there is no fast path, unless
        nothing else fits.
    change : the middle path has the first frame and those before which the mean token of a frame turns most, in place of equal
        distances; it is in the program, whose settings do not use it.
    clip : the CLIP model that the vision tower comes from, see ``cdpruner``; ``accelerate_vlm`` then needs ``processor=``.

    Paper and program: the program shows the larger of a pair in each channel (a mean is another choice of it), puts the paths
    one behind the other, compares one CLIP embedding of a frame in place of its patches, and stretches rotary positions
    twofold, for contexts longer than its model was trained with.
    """

    name = "free-video-llm"
    summary = "frames and regions that the question asks for in detail, all frames pooled"
    paper = "arXiv 2410.10441"
    unit = "picture"
    budget = "at_most"
    default_retain = 0.1
    limits = {"slow": "[0, inf)", "middle": "[0, inf)", "roi": "(0, 1]", "fast": "[0, 1]"}

    slow: int = 3
    middle: int = 5
    roi: float = 0.8
    fast: float = 0.3
    change: bool = False
    clip: str | None = None

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``question [N, q, D]``, ``count [N]`` -> pairs of the regions, and windows, averaged."""
        frame, valid = frame_numbers(tokens), tokens.valid
        kept, parts = torch.zeros_like(valid), []
        for row, (wanted, size) in enumerate(zip(count.tolist(), valid.sum(1).tolist(), strict=True)):
            slots = (frame[row] >= 0).nonzero()[:, 0]
            if wanted >= size or not len(slots):
                kept[row, valid[row].nonzero()[:wanted, 0]] = True
            elif wanted:
                slots = slots[frame[row, slots].argsort(stable=True)]
                slot, source, weight = self.links(Film.of(tokens, row, slots, frame[row, slots], self.clip), wanted)
                kept[row, slots[slot]] = True
                parts.append(Links(torch.full_like(slot, row), slots[slot], slots[source], weight))
        if not parts:
            return Reduction(kept, valid)
        links = [torch.cat(part) for part in zip(*(vars(part).values() for part in parts), strict=True)]
        return Reduction(kept, valid, Links(*links).sorted(valid.shape[1]))

    def links(self, film: Film, count: int) -> Flat:
        """Targets that the tokens of one unit flow into."""
        spent, shown = 0, torch.full_like(film.frame, -1)
        for t in self.detailed(film):
            pair = torch.where(film.frame == t, self.region(film, t), -1)
            cost = len(pair.unique()) - 1
            if spent + cost > (1 - self.fast) * count:
                break
            # numbers of their own for every frame
            shown, spent = torch.where(pair >= 0, pair + t * len(pair), shown), spent + cost
        detail = into_first(shown, shown < -1)
        if spent and not self.fast:
            return detail
        kept = torch.tensor(apportion(count - spent, film.sizes.tolist()), device=shown.device)
        windows = window_grid(torch.cat([torch.ones_like(film.grid[:, :1]), film.grid], 1), kept)[film.frame, 1:]
        row, column = (film.place * windows // film.grid[film.frame]).unbind(1)
        window = ((film.frame * len(row)) + row * windows[:, 1] + column).masked_fill(kept[film.frame] == 0, -1)
        pooled = into_first(window, torch.zeros_like(window, dtype=torch.bool).index_fill(0, detail[0], True))
        return joined((detail, pooled))

    def detailed(self, film: Film) -> list[int]:
        """The frames of the slow path, the most like the question first, and those of the middle one behind them."""
        slow: list[int] = []
        if film.said is not None:
            slow = film.likeness(film.said).argsort(descending=True, stable=True)[: self.slow].tolist()
        middle = [i * len(film.sizes) // self.middle for i in range(self.middle)]
        if self.change and self.middle:
            middle = [first for first, _ in changing_segments(film.means, self.middle - 1, -2.0)]
        return list(dict.fromkeys(slow + middle))

    def region(self, film: Film, t: int) -> Tensor:
        """``[n]`` long: the pair of every token in the region of frame ``t``; -1 outside of the region."""
        high, wide = film.grid[t].tolist()
        wide = (wide + 1) // 2
        pair = film.place[:, 0] * wide + film.place[:, 1] // 2
        if film.said is None or self.roi == 1:
            return pair
        if self.official and high % 2 == 0:
            high, wide = high // 2, wide * 2
        mine = film.frame == t
        space, at = film.space[mine], pair[mine]
        most = torch.full((high * wide, space.shape[1]), -torch.inf, device=space.device)
        most = most.scatter_reduce(0, at[:, None].expand_as(space), space, "amax")
        like = torch.cosine_similarity(most.nan_to_num(neginf=0.0), film.said[None], dim=-1)
        like = like.masked_fill(torch.bincount(at, minlength=len(like)) == 0, -torch.inf)
        best = like.argsort(descending=True, stable=True)[: max(1, int(high * wide * self.roi))]
        inside = torch.ones_like(pair, dtype=torch.bool)
        for place, chosen, length in ((pair // wide, best // wide, high), (pair % wide, best % wide, wide)):
            side = max(1, round(length * sqrt(self.roi)))
            begin = (chosen.sum() // len(chosen) - side // 2).clamp(0, length - side)
            inside &= (place >= begin) & (place < begin + side)
        return torch.where(inside, pair, -1)


@dataclass(frozen=True)
class Film:
    """The tokens of one unit, sorted by frame.

    frame, place : ``[n]`` long, the frame of each, and ``[n, 2]`` long, its row and column there.
    space : ``[n, d]`` float32, the tokens where the question is asked, and ``said [d]`` the question, if there is one.
    sizes, grid, means : of frames: the tokens ``[T]``, the sides ``[T, 2]`` and the mean token ``[T, D]``.
    """

    frame: Tensor
    place: Tensor
    space: Tensor
    said: Tensor | None
    sizes: Tensor
    grid: Tensor
    means: Tensor

    @staticmethod
    def of(tokens: TokenBatch, row: int, slots: Tensor, frame: Tensor, clip: object) -> Film:
        """The ``slots [n]`` of a unit that belong to ``frame [n]``; with ``clip`` the space is that of its text tower."""
        cells, sizes = tokens.cells[row, slots, 1:], torch.bincount(frame)
        by, blank = frame[:, None].expand_as(cells), cells.new_zeros(len(sizes), 2)
        corner = blank.scatter_reduce(0, by, cells, "amin", include_self=False)
        sides = blank.scatter_reduce(0, by, cells, "amax", include_self=False) - corner + 1
        features = tokens.features[row, slots].float()
        space = tokens.signals["patches"][row, slots].float().nan_to_num(0.0) if clip else features
        means = segment_sum(features, sizes) / sizes[:, None]
        return Film(frame, cells - corner[frame], space, question_direction(tokens, row), sizes, sides, means)

    def likeness(self, said: Tensor) -> Tensor:
        """``[T]``: of every frame, the mean cosine of its tokens and what was ``said [d]``."""
        cosine = torch.cosine_similarity(self.space, said[None], dim=-1)
        return segment_sum(cosine[:, None], self.sizes)[:, 0] / self.sizes


def into_first(group: Tensor, taken: Tensor) -> Flat:
    """Links of the groups ``group [n]``, -1 for none, each averaged into its first slot that is not ``taken [n]``; groups
    without one are left out."""
    source = (group >= 0).nonzero()[:, 0]
    _, number, sizes = torch.unique(group[source], return_inverse=True, return_counts=True)
    first = torch.full_like(sizes, len(group))
    first = first.scatter_reduce(0, number, source.masked_fill(taken[source], len(group)), "amin")
    stays = (first < len(group))[number]
    source, number = source[stays], number[stays]
    return first[number], source, (1 / sizes)[number]
