"""Masks and groups of slots: orders, ranks and choices along one axis; they do not wait for the device unless they say
so."""

import torch
from torch import Tensor


# --- one axis ---------------------------------------------------------------------------------------------------------
def true_first(mask: Tensor) -> Tensor:
    """``[..., n]`` long: the slots of ``mask [..., n]`` bool, the true ones in front; both parts in ascending order."""
    return (~mask).long().argsort(dim=-1, stable=True)


def true_last(mask: Tensor) -> Tensor:
    """``[..., n]`` long: the slots of ``mask [..., n]`` bool, the true ones at the end; both parts in ascending order."""
    return mask.long().argsort(dim=-1, stable=True)


def leftmost(mask: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The true slots of every row of ``mask [..., n]`` bool, moved to the left.

    width : how many slots to return, for callers that know the largest number of true ones in a row; without it the host
        waits for that number.

    Returns the slots ``[..., width]`` long, ascending, and ``[..., width]`` bool, which of them are true; short rows are filled
    up with false slots, so that all can be gathered at.
    """
    counts = mask.sum(-1)
    if width is None:
        width = int(counts.max()) if counts.numel() else 0
    return true_first(mask)[..., :width], torch.arange(width, device=mask.device) < counts[..., None]


def resorted(order: Tensor, key: Tensor, descending: bool = False) -> Tensor:
    """``order [..., n]``, a permutation of the slots, sorted again by ``key [..., n]``; equal keys keep their order.

    To sort by several keys, sort by the least significant one first.
    """
    return order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True, descending=descending))


def ranks(order: Tensor) -> Tensor:
    """``[..., n]`` long: the place of every slot in the permutation ``order [..., n]``, that is, the inverse permutation."""
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def suffix_sums(x: Tensor) -> Tensor:
    """``[..., n]``: the sum of every entry of ``x [..., n]`` and all after it; for masks the number of true ones, long."""
    return x.flip(-1).cumsum(-1).flip(-1)


def after_last(mask: Tensor) -> Tensor:
    """``[..., n]`` bool: the slots after the last true one of ``mask [..., n]`` bool; all slots where none is true."""
    return suffix_sums(mask) == 0


def question(text: Tensor, visual: Tensor) -> Tensor:
    """``[B, n]`` bool: the text after the last picture of every row; all text of rows that end in a picture.

    text, visual : ``[B, n]`` bool, the text and the visual tokens; tokens that are neither are padding.
    """
    after = text & after_last(visual)
    return torch.where(after.any(-1, keepdim=True), after, text)


# --- groups -----------------------------------------------------------------------------------------------------------
def group_sizes(group: Tensor, groups: int) -> Tensor:
    """``[N, groups]`` long: how many slots of ``group [N, n]`` are in each group; -1 is in none."""
    onto = torch.where(group < 0, groups, group)
    return torch.zeros(len(group), groups + 1, dtype=torch.long, device=group.device).scatter_add_(
        1, onto, torch.ones_like(onto)
    )[:, :groups]


def rank_in_groups(group: Tensor, groups: int, scores: Tensor | None = None) -> Tensor:
    """``[N, n]`` long: the rank of each slot within its group ``group [N, n]``, highest of ``scores [N, n]`` first.

    Equal scores favour the lower slot and NaN ranks last; without scores slots rank in their order. The ranks of slots in
    group -1 are meaningless.
    """
    onto = torch.where(group < 0, groups, group)
    slot = torch.arange(group.shape[1], device=group.device).expand_as(group)
    order = slot
    if scores is not None:
        order = scores.float().nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True)
    order = resorted(order, onto)
    sizes = group_sizes(onto, groups + 1)
    start = sizes.cumsum(1) - sizes
    return torch.empty_like(order).scatter_(1, order, slot - start.gather(1, onto.gather(1, order)))


def top_in_groups(scores: Tensor, group: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: in every group the ``count [N, G]`` slots of highest ``scores [N, n]``; group -1 takes no part."""
    rank = rank_in_groups(group, count.shape[1], scores)
    return (rank < count.gather(1, group.clamp(min=0))) & (group >= 0)


def even_in_groups(group: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: in every group ``count [N, G]`` evenly spaced slots; group -1 takes no part."""
    rank, inside = rank_in_groups(group, count.shape[1]), group.clamp(min=0)
    size = group_sizes(group, count.shape[1]).gather(1, inside).clamp(min=1)
    k = torch.minimum(count.gather(1, inside), size)
    step = (rank + 1) * k + size // 2
    return (step // size > (step - k) // size) & (group >= 0)
