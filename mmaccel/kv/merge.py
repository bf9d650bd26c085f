"""What becomes of keys that do not stay: merged into those that do. Everything is per KV head, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.masks import true_first

#: entries of the similarities held at once
BLOCK = 1 << 24
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
    few: bool = False,
) -> Merge:
    """Merge every key that is ``gone`` into one that is ``kept``, and its value in the same way.

    With ``c`` the largest cosine of an evicted key ``x`` to the kept ones, ``p`` that kept key, and all means including
    ``p`` itself:

    - ``pivot``: the mean of ``p`` and all ``(x + p) / 2``;
    - ``average``: the mean of ``p`` and the ``x`` whose ``c`` is at least the mean of all ``c`` of the head;
    - ``weighted``: as ``average`` with ``c x`` for ``x``;
    - ``ema``: as ``weighted``, but the bar is an average over calls, ``decay * bar + (1 - decay) * mean``;
    - ``blend``: ``p`` and all ``x``, weighted with 1 and ``(c + 1) / 2``;
    - ``nearest``: the mean of ``p`` and the ``x`` nearest to it in the sequence (ties go to the lower slot).

    *LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference*, Findings of EMNLP 2024,
    arXiv 2406.18139 (the first three); *D2O*, ICLR 2025, arXiv 2406.13035 (``ema``); *Efficient Inference of Vision
    Instruction-Following Models with Elastic Cache*, ECCV 2024, arXiv 2407.18121 (``nearest``).

    Parameters
    ----------
    keys, values : ``[B, H, K, D]``.
    kept, gone : ``[B, H, K]`` bool; slots that are neither take no part.
    threshold : ``[B, H]``, the bar of the last call of ``ema``.
    by_rank : the bar is tested on the mean over heads of the n-th evicted key of each, as in the authors' programs, where
        it mixes keys of different places; by default every head decides for itself.
    few : few keys are ``gone``; of long caches only the parts that hold some are compared, for which the host waits.

    In the papers' programs ``weighted`` and ``ema`` shrink what they merge: ``c x`` counts as one whole term.
    """
    takes = gone & kept.any(-1, keepdim=True)
    if how == "nearest":
        best, pivot = torch.ones_like(kept, dtype=torch.float32), _nearest(kept)
    else:
        best, pivot = _most_alike(keys, kept, gone, few)
    if how in ("average", "weighted", "ema"):
        over = (1, 2) if by_rank else (2,)
        bar = best.masked_fill(~takes, 0.0).sum(over, keepdim=True) / takes.sum(over, keepdim=True).clamp(min=1)
        bar = bar[..., 0].expand(-1, keys.shape[1])
        if how == "ema":
            if threshold is not None:
                bar = torch.where(takes.any(-1), decay * threshold + (1 - decay) * bar, threshold)
            threshold = bar
        takes = takes & ((_by_rank(best, takes) if by_rank else best) >= bar[..., None])
    one = torch.ones_like(best)
    weight = (best + 1) / 2 if how == "blend" else best if how in ("weighted", "ema") else one
    mass = weight if how == "blend" else one
    made = [_add(x, pivot, takes, weight, mass, half=how == "pivot") for x in (keys, values)]
    return Merge(made[0], made[1], threshold)


def _most_alike(keys: Tensor, kept: Tensor, gone: Tensor, few: bool) -> tuple[Tensor, Tensor]:
    """The largest cosine of every evicted key to the kept ones of its head, one to a copy, and whose it is, the lower slot on
    a tie, ``[B, H, K]`` each."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    rows, heads, total, _ = keys.shape
    best = keys.new_full((rows, heads, total), -torch.inf, dtype=torch.float32)
    pivot = torch.zeros((rows, heads, total), dtype=torch.long, device=keys.device)
    height = max(1, BLOCK // max(1, rows * heads * total))
    starts = list(range(0, total, height))
    if few and len(starts) > 1:
        some = torch.stack([gone[..., start : start + height].any() for start in starts]).tolist()
        starts = [start for start, asked in zip(starts, some, strict=True) if asked]
    for start in starts:
        stop = min(start + height, total)
        cosine = (unit[:, :, start:stop] @ unit.transpose(2, 3)).masked_fill(~kept[:, :, None], -torch.inf)
        best[..., start:stop] = most = cosine.amax(-1)
        pivot[..., start:stop] = (cosine >= most[..., None] - _NOISE).byte().argmax(-1)
    copy = (unit - unit.gather(2, pivot[..., None].expand_as(unit))).abs().amax(-1) == 0
    return best.clamp(max=1.0).masked_fill(copy, 1.0).masked_fill(~gone, 0.0), pivot


def _nearest(kept: Tensor) -> Tensor:
    """``[B, H, K]`` long: the kept slot nearest to each slot, the lower of two."""
    total = kept.shape[-1]
    slot = torch.arange(total, device=kept.device).expand(kept.shape)
    before = torch.where(kept, slot, -total).cummax(-1).values
    after = torch.where(kept, slot, 2 * total).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(slot - before <= after - slot, before, after).clamp(0, total - 1)


def _by_rank(best: Tensor, takes: Tensor) -> Tensor:
    """``best [B, H, K]`` of the n-th evicted key of every head replaced by the mean over heads of their n-th."""
    order = true_first(takes)
    there = takes.gather(-1, order)
    column = best.gather(-1, order).masked_fill(~there, 0.0).sum(1) / there.sum(1).clamp(min=1)
    rank = (takes.long().cumsum(-1) - 1).clamp(min=0)
    return column[:, None].expand_as(best).gather(-1, rank)


def _add(x: Tensor, pivot: Tensor, takes: Tensor, weight: Tensor, mass: Tensor, half: bool) -> Tensor:
    """``(p + sum(weight * x)) / (1 + sum(mass))`` for every slot ``p`` that something flows into; others as they are."""
    slots = x.shape[:3].numel()
    head = torch.arange(0, slots, x.shape[2], device=x.device).view(*x.shape[:2], 1)
    # what flows nowhere comes last, into a slot that is none; so every size is known without asking the device
    onto = (pivot + head).masked_fill(~takes, slots).flatten()
    source = onto.argsort(stable=True)
    lengths = torch.searchsorted(onto[source], torch.arange(slots + 1, device=x.device)).diff()
    flat, onto = x.flatten(0, 2), onto[source].clamp(max=slots - 1)
    part = flat[source].float() * weight.flatten()[source, None]
    if half:
        part = (flat[source].float() + flat[onto].float()) / 2
    # sums in a fixed order, without atomics
    part = torch.cat([part, mass.flatten()[source, None]], dim=1)
    summed = torch.segment_reduce(part, "sum", lengths=lengths, axis=0, unsafe=True)
    made = ((flat.float() + summed[:, :-1]) / (1 + summed[:, -1:])).to(x.dtype)
    return torch.where((lengths > 0)[:, None], made, flat).view_as(x)
