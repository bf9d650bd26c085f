"""EM-LLM: frames form events, and a question recalls the events that are like it, with those next to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...method import RecallPolicy, register
from ...method.recall import by_query_head

#: how well a similarity graph falls into two parts
Measure = Literal["modularity", "conductance", "intra_inter_sim", "none"]


@register
class EMLLM(RecallPolicy):
    """Parked frames are cut into events where something surprising happens, and a question recalls whole events.

    *Human-inspired Episodic Memory for Infinite Context LLMs*, ICLR 2025, arXiv 2407.09450.

    The surprise of a frame is ``1 - cos`` of its mean key and that of the frame before. An event begins where it is above
    ``mean + gamma std`` of the surprise over the last ``local`` frames. Each boundary then moves back to where the graph of
    similarities between frames falls into two parts best (see :meth:`moved`). The rating of an event is
    ``<mean_q q, mean_k k>`` over the question's tokens and the event's frames, all query heads side by side. The best events
    are read while ``1 - contiguity`` of ``frames`` lasts, then the events next to them, nearest in time to the best first.

    Parameters
    ----------
    frames : the buffers of the program hold 4096 tokens, the frames here 64.
    gamma : how surprising a boundary is. 1.0 as in the released configurations.
    local : the frames that surprise is compared with.
    shortest, longest : frames that an event has; 8 to 128 tokens in the program.
    refine : the measure by which boundaries move: ``modularity`` as in the paper, ``conductance``, ``intra_inter_sim``, or
        ``none`` as in the released configurations.
    contiguity : share of ``frames`` for the events next to recalled ones; 0.3 as in the program.
    while_reading : every stretch of new frames recalls events, as in the program.

    Paper and program: both take the surprise of the next token, which pixels do not have; and an event is represented by the
    keys that its own window attended to most, here by the mean.
    """

    name = "em-llm"
    summary = "frames in events that begin with a surprise; the events most like the question, and those next to them"
    paper = "arXiv 2407.09450"
    default_retain = 0.25
    limits = {
        "gamma": "(-inf, inf)",
        "local": "[1, inf)",
        "shortest": "[1, inf)",
        "longest": "[1, inf)",
        "contiguity": "[0, 1)",
    }

    gamma: float = 1.0
    local: int = 64
    shortest: int = 2
    longest: int = 32
    refine: Measure = "modularity"
    contiguity: float = 0.3
    while_reading: bool = True

    def rate(self, query: Tensor, frames: Tensor) -> Tensor:
        """Every frame has the rating of its event."""
        begins = self.events(frames)
        sizes = torch.tensor([*begins[1:], len(frames)]) - torch.tensor(begins)
        return self._ratings(query, frames, begins).repeat_interleave(sizes.to(frames.device))

    def choose(self, query: Tensor, frames: Tensor) -> Tensor:
        """Whole events, of the last one as many frames as there is room for."""
        begins = self.events(frames)
        ends = [*begins[1:], len(frames)]
        order = self._ratings(query, frames, begins).argsort(descending=True, stable=True).tolist()
        similar, taken = max(1, self.frames - int(self.contiguity * self.frames)), dict[int, None]()
        for event in order:
            if len(taken) >= similar:
                break
            taken |= dict.fromkeys(range(begins[event], min(ends[event], begins[event] + similar - len(taken))))
        beside = [near for event in order if begins[event] in taken for near in (event - 1, event + 1)]
        for event in beside:
            if 0 <= event < len(begins):
                new = [frame for frame in range(begins[event], ends[event]) if frame not in taken]
                taken |= dict.fromkeys(new[: self.frames - len(taken)])
        return torch.tensor(sorted(taken), dtype=torch.long)

    def events(self, frames: Tensor) -> list[int]:
        """The first frame of every event, where ``frames [F, Hkv, D]`` are mean keys."""
        unit = normalize(frames.flatten(1), dim=1)
        surprise = 1 - (unit[1:] * unit[:-1]).sum(1)
        begins = [0]
        for frame in range(1, len(frames)):
            seen, size = surprise[max(0, frame - 1 - self.local) : frame - 1], frame - begins[-1]
            surprising = len(seen) > 1 and bool(surprise[frame - 1] > seen.mean() + self.gamma * seen.std())
            if size >= self.longest or (surprising and size >= self.shortest):
                begins.append(frame)
        if self.refine == "none" or len(begins) == 1:
            return begins
        return [0, *self.moved(begins[1:], (unit @ unit.T).clamp(min=0))]

    def moved(self, boundaries: Sequence[int], similar: Tensor) -> list[int]:
        """Boundaries of events, each moved back to where the parts before and behind it are most alike in themselves.

        A boundary moves to ``t`` at least ``shortest`` behind the last one, before where it was, of the best measure (of equal
        ones the first) of the two parts ``[a, t)`` and ``[t, b)``, where ``[a, b)`` is the event widened by half of it on both
        sides. One that follows the last by ``shortest`` or less stays; of those given closer than ``shortest`` to the one
        before, the later one is left out.

        boundaries : rising. similar : ``[n, n]``, not negative.
        """
        made = [0]
        for i, here in enumerate(boundaries):
            size = here - made[-1]
            if i and here - boundaries[i - 1] < self.shortest:
                continue
            if size <= self.shortest:
                made.append(here)
                continue
            first, last = max(0, made[-1] - size // 2), min(len(similar), here + size // 2)
            cuts = range(made[-1] - first + self.shortest, here - first)
            fits = torch.stack([_fit(similar[first:last, first:last], cut, self.refine) for cut in cuts])
            made.append(first + cuts[int(fits.argmax())])
        return made[1:]

    @staticmethod
    def _ratings(query: Tensor, frames: Tensor, begins: Sequence[int]) -> Tensor:
        means = torch.stack([event.mean(0) for event in frames.tensor_split(list(begins[1:]))])
        return by_query_head(means, len(query)) @ query.mean(1).flatten()


def _fit(similar: Tensor, cut: int, measure: Measure) -> Tensor:
    """How well a graph ``[n, n]`` falls into its first ``cut`` nodes and the others, of the higher the better."""
    if measure == "modularity":
        return modularity(similar, [0, cut])
    inside = torch.stack([similar[:cut, :cut].sum(), similar[cut:, cut:].sum()])
    across = torch.stack([similar[:cut, cut:].sum(), similar[cut:, :cut].sum()])
    if measure == "conductance":
        smaller = torch.minimum(inside, similar.sum() - inside)
        return -(across / torch.where(smaller == 0, 1e-15, smaller)).min()
    sizes = torch.tensor([cut, len(similar) - cut], device=similar.device)
    return (inside / sizes**2 * (sizes.prod() / across.clamp(min=torch.finfo(across.dtype).tiny))).mean()


def modularity(similar: Tensor, begins: Sequence[int]) -> Tensor:
    """Half the modularity of a graph ``similar [n, n]`` whose parts begin at ``begins``, as the program has it."""
    total = similar.sum()
    expected = similar.sum(0)[:, None] * similar.sum(1)[None] / total
    spans = zip(begins, [*begins[1:], len(similar)], strict=True)
    return sum(((similar - expected)[a:b, a:b].sum() for a, b in spans), similar.new_zeros(())) / (2 * total)
