"""Budgets of the cache, split over layers and over the KV heads of a layer.

Every function is exact: what it gives sums to what was asked for. The authors' roundings stand beside them.
"""

import functools
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import ranks
from ..core.reduction import top_mask


# --- over layers ------------------------------------------------------------------------------------------------------
def pyramid(count: int, sizes: list[int], beta: float) -> list[int]:
    """An arithmetic row over the layers with mean ``count``; the last layer has ``count / beta``.

    *PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling*, arXiv 2406.02069.
    """
    layers = len(sizes)
    most, least = pyramid_ends(count, max(sizes), Fraction(str(beta)))
    shares = [float(most - (most - least) * i / max(1, layers - 1)) for i in range(layers)]
    return apportion(count * layers, sizes, shares)


def pyramid_ends(count: int, size: int, beta: Fraction) -> tuple[Fraction, Fraction]:
    """Budgets of the first and the last layer of a pyramid with mean ``count``, where a layer has ``size`` keys at most."""
    least = count / beta
    most = 2 * count - least
    return (Fraction(size), Fraction(2 * count - size)) if most >= size else (most, least)


def pyramid_official(capacity: int, window: int, size: int, layers: int, beta: float) -> list[int]:
    """Keys per layer in the authors' program, the window included: whole steps, and no pyramid for short prompts."""
    count = capacity - window
    if size < capacity:
        return [size] * layers
    if size < 2 * count:
        return [capacity] * layers
    least = int(count // beta)
    most = 2 * count - least
    if most >= size - window:
        most, least = size - window, 2 * count - (size - window)
    step = (most - least) // max(1, layers - 1)
    return [most - i * step + window for i in range(layers)]


def pyramid_windowkv(count: int, layers: int, beta: float) -> list[int]:
    """Keys per layer in the program of WindowKV: whole steps down to the last layer, which has ``int(count / beta)``."""
    least = int(count / beta)
    most = 2 * count - least
    step = (most - least) // max(1, layers - 1)
    return [*(most - i * step for i in range(layers - 1)), least if layers > 1 else count]


def pyramid_kvpress(count: int, window: int, size: int, layers: int, beta: float) -> list[int]:
    """Keys per layer in kvpress: the row leaves the ``window`` out, and is flat where the last layer had less than that."""
    least = count / beta
    most = 2 * count - least
    if most >= size - window:
        most, least = size - window, 2 * count - (size - window)
    if not size >= most >= least >= window:
        return [count] * layers
    return [round(most - i * (most - least) / max(1, layers - 1)) for i in range(layers)]


def by_shares(count: int, sizes: list[int], shares: list[float], uniform: float = 0.0) -> list[int]:
    """Mean ``count`` in proportion to ``shares``, of which ``uniform`` is given to all layers alike.

    Every layer has at least a hundredth of its keys, and one (VL-Cache clips shares there).
    """
    layers, total = len(sizes), sum(shares)
    even = [1.0 / layers] * layers
    mixed = [uniform * e + (1 - uniform) * (s / total if total > 0 else e) for e, s in zip(even, shares, strict=True)]
    least = [min(size, count, max(1, size // 100)) for size in sizes]
    rest = apportion(count * layers - sum(least), [size - low for size, low in zip(sizes, least, strict=True)], mixed)
    return [low + more for low, more in zip(least, rest, strict=True)]


def clipped_shares(seen: Tensor, ratio: float) -> Tensor:
    """The share of its keys each layer keeps in authors' programs, ``[L]``: ``clip(seen / sum(seen) * ratio * L, 0.01, 1)``.

    *VL-Cache: Sparsity and Modality-Aware KV Cache Compression*, ICLR 2025, arXiv 2410.23317: ``seen`` is one minus the
    sparsity of a layer. *MEDA: Dynamic KV Cache Allocation for Efficient Multimodal Long-Context Inference*, NAACL 2025, arXiv
    2502.17599: it is ``exp(E)`` of the entropy ``E`` of the attention each query pays, mean over queries and heads; the
    entropies between text and pictures of the paper are in a function that its program does not call. The clip may change
    the mean; :func:`by_shares` meets it.
    """
    return (seen.double() / seen.double().sum() * ratio * len(seen)).clamp(0.01, 1.0).float()


def clipped_official(count: int, sizes: list[int], seen: Tensor, newest: float) -> list[int]:
    """Keys per layer by :func:`clipped_shares`, truncated; the share ``newest`` of the budget is the same for all layers."""
    recent = int(newest * count)
    shares = (clipped_shares(seen, count / max(1, size) * (1 - newest))[i] for i, size in enumerate(sizes))
    return [min(size, max(1, int(share * size)) + recent) for size, share in zip(sizes, shares, strict=True)]


def prefix(scores: list[Tensor], count: int) -> list[int]:
    """One share of the summed scores for all layers, so that the layers keep ``count`` keys in the mean.

    *PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need*, arXiv 2412.03409: the keys of
    each layer in falling order of their scores, cut where their sum reaches the same share ``p`` everywhere.

    scores : per layer ``[n]`` float, not negative; or of several layers ``[layers, n]``.

    The keys of all layers are sorted by the share of the sum in front of them; the first ``count * L`` stay. That is the
    program's binary search for ``p`` carried to its end.
    """
    before = [share for some in scores for share in _mass_before(some if some.dim() > 1 else some[None])]
    total = min(count * len(before), sum(map(len, before)))
    everything = torch.cat(before)
    kept = everything.argsort(stable=True)[:total]
    owner = torch.repeat_interleave(torch.arange(len(before)), torch.tensor([len(b) for b in before]))
    return torch.bincount(owner[kept.cpu()], minlength=len(before)).tolist()


def _mass_before(scores: Tensor) -> Tensor:
    """The share of the sum that the larger of ``scores [layers, n]`` hold, for each in falling order; the first has -1: one
    always stays."""
    ordered = scores.double().sort(descending=True, stable=True).values
    share = ordered.cumsum(1) / ordered.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.cat([share.new_full((len(share), min(1, share.shape[1])), -1.0), share[:, :-1]], dim=1)


def prefix_official(scores: list[Tensor], target: int, protect: int) -> list[int]:
    """Keys each layer keeps in the authors' program, before it is rescaled; per layer ``scores [n]``.

    The search for the share stops within 5 keys of ``target``, the number to drop over all layers. ``protect`` keys of every
    layer stay whatever their score.
    """
    ordered = [some.sort(descending=True).values for some in scores]
    share = [some.cumsum(0) / some.sum() for some in ordered]
    low, high, dropped = 0.0, 1.0, [0] * len(scores)
    for _ in range(100):
        middle = (low + high) / 2
        dropped = [max(0, len(some) - int((some < middle).sum()) - 1 - protect) for some in share]
        over = sum(dropped) - target
        if abs(over) < 5:
            break
        low, high = (middle, high) if over > 0 else (low, middle)
    return [len(some) - gone for some, gone in zip(scores, dropped, strict=True)]


def variance_ratios(scores: Iterable[Tensor]) -> Tensor:
    """``[L]``: the share of each layer, ``softmax(-v)`` of how much its scores vary.

    *D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference*, ICLR 2025, arXiv 2406.13035: ``v`` is
    the variance over keys of the attention each received, brought to [0, 1] over the heads, mean over heads.

    scores : the variances, per layer ``[H]``; or of several layers ``[layers, H]``.
    """
    spread = []
    for some in scores:
        low, high = some.amin(-1, keepdim=True), some.amax(-1, keepdim=True)
        share = (some - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
        spread.append(share.mean(-1).view(-1))
    return (-torch.cat(spread)).softmax(0)


def squeezed(cosines: list[float]) -> list[bool]:
    """Find the layers with the highest cosines, by 3-means.

    *SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget*, ICLR 2025, arXiv 2404.04793:
    ``c_l`` is the cosine of the hidden state before and behind the attention of layer ``l``, mean over the tokens of a prompt;
    3-means of these numbers. The optimum is found by trying all cuts between sorted numbers (the program begins at random).
    Of layers with one and the same cosine none is in the class.
    """
    values = sorted(set(cosines))
    if len(values) < 2:
        return [False] * len(cosines)
    ordered = torch.tensor(sorted(cosines), dtype=torch.float64)
    cuts = [n for n in range(1, len(ordered)) if ordered[n] > ordered[n - 1]]
    if len(values) == 2:
        first = values[1]
    else:
        pairs = [(low, high) for low in cuts for high in cuts if low < high]

        @functools.cache
        def spread(first: int, last: int) -> float:
            part = ordered[first:last]
            return float((part - part.mean()).square().sum())

        loss = [spread(0, low) + spread(low, high) + spread(high, len(ordered)) for low, high in pairs]
        first = float(ordered[pairs[loss.index(min(loss))][1]])
    return [value >= first for value in cosines]


def by_squeeze(count: int, sizes: list[int], low: list[bool], share: float) -> list[int]:
    """Keys per layer, ``count`` in the mean: ``low`` layers get ``share`` of the mean, the others divide the rest equally."""
    rest = (len(low) - sum(low) * share) / max(1, len(low) - sum(low))
    shares = [share if is_low else max(0.0, rest) for is_low in low]
    exact = apportion(count * len(sizes), sizes, shares)
    # every layer keeps a key
    return exact if min(exact) else by_shares(count, sizes, shares)


def squeezed_official(size: int, low: list[bool], kept: float, share: float) -> list[int]:
    """Keys per layer in the authors' program, truncated: of ``size`` keys the share ``kept`` stays in the mean, before that."""
    # a decimal that a product of two others was rounded from
    percent, layers, few = round(kept * share, 12), len(low), sum(low)
    rest = int((layers * kept - few * percent) / max(1, layers - few) * size)
    return [min(size, max(0, int(percent * size) if is_low else rest)) for is_low in low]


# --- over heads -------------------------------------------------------------------------------------------------------
def adaptive(scores: Tensor, candidates: Tensor, count: Tensor, floor: float, official: bool = False) -> Tensor:
    """Keys per head, ``[B, H]`` long: heads compete for ``(1 - floor)`` of the layer's budget.

    *Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation*, NeurIPS 2025, arXiv 2407.11550: of the best
    ``H * count`` keys of all heads together, ``c_h`` are of head h; it gets ``(1 - floor) c_h + floor count``.

    scores : ``[B, H, K]``, infinite for keys that must stay; candidates : ``[B, K]`` bool, the keys that compete;
        count : ``[B]``, the mean over heads.
    official : as in the authors' program the heads compete for what ``count`` leaves beside the keys that must stay (the
        observation window), the floor's share of that is cut to a whole number, and every head's number is rounded by itself;
        else they sum to ``H * count``.
    """
    heads = scores.shape[1]
    wide = candidates.repeat(1, heads)
    best = top_mask(scores.flatten(1), wide, count * heads)
    won = best.unflatten(1, (heads, -1)).sum(-1)
    if official:
        must = (scores.isposinf() & candidates[:, None]).sum(-1)
        free = (count[:, None] - must).clamp(min=0)
        return must + ((won - must) * (1 - floor) + (floor * free.double()).floor()).round().long()
    ideal = won.double() * (1 - floor) + floor * count[:, None].double()
    given = ideal.floor().long()
    # largest remainders, ties to the lower head
    rest = won.sum(1) - given.sum(1)
    return given + (ranks((given - ideal).argsort(dim=1, stable=True)) < rest[:, None])


def concentrated(scores: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """Scores ``[B, H, K]`` times the share of its head's sum that the best ``count [B]`` of ``candidates [B, K]`` hold, so that
    heads that need few keys win more of them: an option of the authors' program of Ada-KV."""
    heads = scores.shape[1]
    rows, rivals = scores.flatten(0, 1), candidates.repeat_interleave(heads, dim=0)
    finite = rows.masked_fill(~(rivals & rows.isfinite()), 0.0)
    best = finite.masked_fill(~top_mask(rows, rivals, count.repeat_interleave(heads)), 0.0).sum(1)
    share = best / finite.sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(scores.isfinite(), scores * share.view(-1, heads, 1), scores)


def safeguard(scores: Tensor, candidates: Tensor, count: Tensor, floor: float) -> Tensor:
    """Mask of the keys that stay, ``[B, H, K]`` bool: the best ``floor * count`` of every head, then the best of all heads."""
    heads = scores.shape[1]
    least = (count.double() * floor + 1e-9).floor().long().repeat_interleave(heads)
    sure = top_mask(scores.flatten(0, 1), candidates.repeat_interleave(heads, dim=0), least).view_as(scores)
    forced = scores.masked_fill(sure, torch.inf)
    return top_mask(forced.flatten(1), candidates.repeat(1, heads), count * heads).unflatten(1, (heads, -1))
