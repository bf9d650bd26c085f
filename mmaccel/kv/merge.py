"""Merging evicted keys into kept ones. Everything is per KV head, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ..core.masks import leftmost

#: entries of the similarities held at once: on a CPU they stay in the cache of a core
CACHED, BLOCK = 1 << 17, 1 << 24
#: so many evicted keys of a head are compared with all slots, since finding those that stay costs more
FEW = 16
#: cosines that are nearer than this to the largest are equal to it: copies tie however a product rounds
_NOISE = 1e-6


@dataclass(frozen=True)
class Merge:
    """Keys and values after a merge, ``[B, H, K, D]`` with every slot in place; ``threshold [B, H]`` is what ``ema`` hands
    to its next call."""

    keys: Tensor
    values: Tensor
    threshold: Tensor | None = None


def merge(
    how: str,
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
    gone: Tensor,
    *,
    decay: float = 0.5,
    threshold: Tensor | None = None,
    by_rank: bool = False,
    most: int | None = None,
    stay: int | None = None,
    renewed: bool = False,
    share: float = 1.0,
) -> Merge:
    """Merge every key that is ``gone`` into one that is ``kept``, and its value in the same way.

    With ``c`` the largest cosine of an evicted key ``x`` to the kept ones, ``p`` that kept key, and all means including
    ``p`` itself:

    - ``pivot``: the mean of ``p`` and all ``(x + p) / 2``;
    - ``average``: the mean of ``p`` and the ``x`` whose ``c`` is at least the mean of all ``c`` of the head;
    - ``weighted``: as ``average`` with ``c x`` for ``x``;
    - ``ema``: as ``weighted``, but the bar is an average over calls, ``decay * bar + (1 - decay) * mean``;
    - ``blend``: ``p`` and all ``x``, weighted with 1 and ``(c + 1) / 2``;
    - ``nearest``: the mean of ``p`` and the ``x`` nearest to it in the sequence (ties go to the lower slot);
    - ``values``: values alone, ``p`` and the ``x`` whose ``c`` is at least ``decay``, of these the ``share`` of all evicted
      ones with the largest ``c``, weighted with 1 and ``c ||x|| / (||x|| + ||p||)`` of the values; keys stay as they are.

    *LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference*, Findings of EMNLP 2024,
    arXiv 2406.18139 (the first three); *D2O*, ICLR 2025, arXiv 2406.13035 (``ema``); *Efficient Inference of Vision
    Instruction-Following Models with Elastic Cache*, ECCV 2024, arXiv 2407.18121 (``nearest``); ``MergingPress`` of kvpress,
    https://github.com/NVIDIA/kvpress (``values``).

    keys, values : ``[B, H, K, D]``. kept, gone : ``[B, H, K]`` bool; slots that are neither take no part.
    threshold : ``[B, H]``, the bar of the last call of ``ema``; NaN for heads that had no call.
    renewed : whether ``threshold`` may be NaN anywhere.
    by_rank : the bar is tested on the mean over heads of the n-th evicted key of each, as in the authors' programs, where
        it mixes keys of different places; by default every head decides for itself.
    most, stay : how many keys of a head are ``gone``, and how many ``kept``, at most, where the host knows; no others are
        looked at. By default all may be.

    In the papers' programs ``weighted`` and ``ema`` shrink what they merge: ``c x`` counts as one whole term.
    """
    at, valid = leftmost(gone, keys.shape[2] if most is None else min(most, keys.shape[2]))
    if not at.numel():
        return Merge(keys, values, threshold)
    takes = valid & kept.any(-1, keepdim=True)
    if how == "nearest":
        best, pivot = torch.ones_like(at, dtype=torch.float32), _nearest(kept).gather(-1, at)
    else:
        best, pivot = _most_alike(keys, kept, at, valid, keys.shape[2] if stay is None else stay)
    if how in ("average", "weighted", "ema"):
        over = (1, 2) if by_rank else (2,)
        bar = best.masked_fill(~takes, 0.0).sum(over, keepdim=True) / takes.sum(over, keepdim=True).clamp(min=1)
        bar = bar[..., 0].expand(-1, keys.shape[1])
        if how == "ema":
            if threshold is not None:
                mean = decay * threshold + (1 - decay) * bar
                mean = torch.where(threshold.isnan(), bar, mean) if renewed else mean
                bar = torch.where(takes.any(-1), mean, threshold)
            threshold = bar
        takes = takes & ((_by_rank(best, takes) if by_rank else best) >= bar[..., None])
    if how == "values":
        # of equal cosines all take part
        ranked = best.masked_fill(~valid, -torch.inf).sort(dim=-1, descending=True).values
        number = valid.sum(-1, keepdim=True)
        last = number - ((1 - share) * (number - 1) - 1e-6).ceil().clamp(min=0).long() - 1
        takes = takes & (best >= decay) & (best >= ranked.gather(-1, last.clamp(min=0)))
        best = best.clamp(min=0)
    one = torch.ones_like(best)
    weight = (best + 1) / 2 if how == "blend" else best if how in ("weighted", "ema") else one
    mass = weight if how == "blend" else one
    if how == "values":
        norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
        mine, theirs = norms.gather(-1, at), norms.gather(-1, pivot)
        weight = mass = best * mine / (mine + theirs + 1e-6)
        takes = takes & (weight > 0)
        flow = _Flow.of(at, pivot, takes, weight, mass, keys.shape[2])
        return Merge(keys, flow.into(values, False), threshold)
    flow = _Flow.of(at, pivot, takes, weight, mass, keys.shape[2])
    half = how == "pivot"
    return Merge(flow.into(keys, half), flow.into(values, half), threshold)


def averaged(x: Tensor, onto: Tensor, weight: Tensor) -> Tensor:
    """``x [B, H, n, D]`` in which slots hold the mean of all that flows into them.

    onto : ``[B, n]`` long, the slot that each flows into, -1 for none; a slot that something flows into names itself.
    weight : ``[B, n]`` float32 above 0, the weight of each in its mean.
    """
    rows, heads, total = x.shape[:3]
    at = torch.arange(total, device=x.device).expand(rows, total)
    pivot = onto.clamp(min=0)
    share, takes = weight / weight.gather(1, pivot), (onto >= 0) & (onto != at)
    shape = rows, heads, total
    at, pivot, takes, share = (part[:, None].expand(shape) for part in (at, pivot, takes, share))
    return _Flow.of(at, pivot, takes, share, share, total).into(x, False)


def _most_alike(keys: Tensor, kept: Tensor, at: Tensor, valid: Tensor, stay: int) -> tuple[Tensor, Tensor]:
    """The largest cosine of every evicted key to the kept ones of its head, ``stay`` at most, one to a copy, and whose it is,
    the lower slot on a tie, ``[B, H, n]`` each; the evicted ones are those ``at [B, H, n]`` that are ``valid``."""
    unit = normalize(keys.float(), dim=-1)
    rows, heads, total, width = keys.shape
    flat, head = unit.flatten(0, 2), torch.arange(0, rows * heads * total, total, device=at.device).view(rows, heads, 1)

    def of(slots: Tensor) -> Tensor:
        """``[B, H, n, D]``; whole vectors are copied faster than a gather copies their channels."""
        return flat.index_select(0, (slots + head).flatten()).view(*slots.shape, width)

    mine, against, held, slots = of(at), unit.transpose(2, 3), kept, None
    if at.shape[2] > FEW and stay < total:
        slots, held = leftmost(kept, max(1, stay))
        against = of(slots).transpose(2, 3)
    size = CACHED if keys.device.type == "cpu" else BLOCK
    height = max(1, size // max(1, rows * heads * against.shape[3]))
    parts = []
    for part in mine.split(height, dim=2):
        cosine = (part @ against).masked_fill_(~held[:, :, None], -torch.inf)
        most = cosine.amax(-1)
        parts.append((most, (cosine >= most[..., None] - _NOISE).byte().argmax(-1)))
    best, pivot = (x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    pivot = pivot if slots is None else slots.gather(2, pivot)
    copy = (mine - of(pivot)).abs().amax(-1) == 0
    return best.clamp(max=1.0).masked_fill(copy, 1.0).masked_fill(~valid, 0.0), pivot


def _nearest(kept: Tensor) -> Tensor:
    """``[B, H, K]`` long: the kept slot nearest to each slot, the lower of two."""
    total = kept.shape[-1]
    slot = torch.arange(total, device=kept.device).expand(kept.shape)
    before = torch.where(kept, slot, -total).cummax(-1).values
    after = torch.where(kept, slot, 2 * total).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(slot - before <= after - slot, before, after).clamp(0, total - 1)


def _by_rank(best: Tensor, takes: Tensor) -> Tensor:
    """``best [B, H, n]`` of the n-th evicted key of every head replaced by the mean over heads of their n-th; a head takes
    part with all its keys or with none."""
    return (best.masked_fill(~takes, 0.0).sum(1) / takes.sum(1).clamp(min=1))[:, None].expand_as(best)


@dataclass(frozen=True)
class _Flow:
    """What flows where, for keys and values alike: ``n`` keys in the order of the slots they flow into, the slots of all heads
    counted on.

    source, onto : ``[n]`` long, the slot of each, and that of its pivot, one behind the last for what flows nowhere.
    run : ``[n]`` long, which of the runs of equal pivots each is in. lengths : ``[n + 1]`` long, how long these are; 0 behind
        the last. None on a CPU.
    weight, mass : ``[n, 1]``, see :meth:`into`.
    """

    source: Tensor
    onto: Tensor
    run: Tensor
    lengths: Tensor | None
    weight: Tensor
    mass: Tensor

    @staticmethod
    def of(at: Tensor, pivot: Tensor, takes: Tensor, weight: Tensor, mass: Tensor, total: int) -> _Flow:
        """Keys ``at [B, H, n]`` of heads with ``total`` slots flow into ``pivot`` where that ``takes`` them."""
        slots = takes.shape[0] * takes.shape[1] * total
        head = torch.arange(0, slots, total, device=at.device).view(*at.shape[:2], 1)
        # what flows nowhere comes last, into a slot that is none; so every size is known without asking the device
        onto, order = (pivot + head).masked_fill(~takes, slots).flatten().sort(stable=True)
        run = pad((onto.diff() != 0).cumsum(0), (1, 0))
        lengths = None
        if at.device.type != "cpu":
            lengths = torch.searchsorted(run, torch.arange(len(run) + 1, device=at.device)).diff()
        weight, mass = (each.flatten()[order, None] for each in (weight, mass))
        return _Flow((at + head).flatten()[order], onto, run, lengths, weight, mass)

    def into(self, x: Tensor, half: bool) -> Tensor:
        """``(p + sum(weight * x)) / (1 + sum(mass))`` for every slot ``p`` of ``x [B, H, K, D]`` that something flows into,
        others as they are; ``half``: the mean of what flows and ``p`` in place of ``weight * x``."""
        flat = pad(x.flatten(0, 2), (0, 0, 0, 1))
        part, pivots = flat.index_select(0, self.source).float(), flat.index_select(0, self.onto).float()
        part = (part + pivots) / 2 if half else part * self.weight
        part = torch.cat([part, self.mass], dim=1)
        if self.lengths is None:
            # the same sums in the same order, several times as fast on a CPU
            summed = torch.zeros_like(part).index_add_(0, self.run, part)
        else:
            # in a fixed order, without atomics
            summed = torch.segment_reduce(part, "sum", lengths=self.lengths, axis=0, unsafe=True)
        summed = summed.index_select(0, self.run)
        # all that flows into one slot puts the same number there
        flat.index_copy_(0, self.onto, ((pivots + summed[:, :-1]) / (1 + summed[:, -1:])).to(x.dtype))
        return flat[:-1].view_as(x)
