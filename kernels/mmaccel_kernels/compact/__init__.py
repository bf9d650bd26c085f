"""Compaction: the kept keys and values of every head, moved together in one launch, merged or as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import run
from .naive import Compacted, Plan, compact_definition, compact_plan
from .triton import compact_kernel


def compact(
    keys: Tensor,
    values: Tensor,
    kept: Tensor | Plan,
    *,
    owner: Tensor | None = None,
    weight: Tensor | None = None,
    total: int | None = None,
) -> Compacted:
    """Gather what every head keeps into flat storage.

    Parameters
    ----------
    keys, values : ``[B, H, K, D]`` and ``[B, H, K, Dv]``.
    kept : ``[B, H, K]`` bool; or ``[B, H, m]`` whole numbers, the kept slots of each head in ascending order, -1 at the
        ends of short lists; or what :func:`.compact_plan` made of them.
    owner : ``[B, H, K]`` long, the kept slot that each slot flows into; -1 for those that are dropped. A kept slot is not
        in its own sum unless it owns itself. By default kept slots hold themselves and nothing else.
    weight : ``[B, H, K]`` float32, the factor of each slot in the sum it flows into; by default 1. Sums are in float32, in
        ascending order of slots.
    total : how many are kept in all, where it is known without asking the device; then nothing waits for it.

    Returns
    -------
    Compacted
        Of the type of the input.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    _check(keys, values, kept, owner, weight)
    if isinstance(kept, Tensor) and kept.dtype != torch.bool:
        # one column more takes the ends of short lists
        found = torch.zeros(*keys.shape[:2], keys.shape[2] + 1, dtype=torch.bool, device=kept.device)
        kept = found.scatter_(2, kept.long() % (keys.shape[2] + 1), True)[..., :-1]
    return run(compact_kernel, compact_definition, keys, values, kept, owner, weight, total)


def compact_cost(total: int, members: int, width: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that a launch has to move at least for ``total`` outputs made of ``members`` inputs, ``width`` channels of keys and
    values together, and its floating-point operations; weights and indices included, of a merge."""
    return bytes_each * width * (members + total) + members * (8 + 4) + 8 * (total + 1), 2 * members * width


def _check(keys: Tensor, values: Tensor, kept: Tensor | Plan, owner: Tensor | None, weight: Tensor | None) -> None:
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"compact takes keys [B, H, K, D] and values [B, H, K, Dv], not {tuple(keys.shape)} and {tuple(values.shape)}."
        )
    if keys.dtype != values.dtype or keys.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"compact takes keys and values of one type, of 16, 32 or 64 bits, not {keys.dtype} and {values.dtype}."
        )
    shape = tuple(keys.shape[:3])
    if isinstance(kept, Plan):
        if kept.lengths.shape != keys.shape[:2] or owner is not None or weight is not None:
            raise ValueError(
                f"compact takes a plan of {list(keys.shape[:2])} rows and heads without owner and weight, not of "
                f"{list(kept.lengths.shape)}."
            )
        return
    fits = tuple(kept.shape) == shape if kept.dtype == torch.bool else tuple(kept.shape[:-1]) == shape[:2]
    if kept.is_floating_point() or kept.dim() != 3 or not fits:
        raise ValueError(
            f"compact takes kept [B, H, K] = {shape} bool or a list of slots [B, H, m], not {tuple(kept.shape)} {kept.dtype}."
        )
    if owner is not None and (tuple(owner.shape) != shape or owner.dtype != torch.long):
        raise ValueError(f"compact takes owner [B, H, K] = {shape} long, not {tuple(owner.shape)} {owner.dtype}.")
    if weight is not None and (owner is None or tuple(weight.shape) != shape or weight.dtype != torch.float32):
        raise ValueError(
            f"compact takes weight [B, H, K] = {shape} float32 beside an owner, not {tuple(weight.shape)} {weight.dtype}."
        )


__all__ = ["Compacted", "Plan", "compact", "compact_cost", "compact_definition", "compact_kernel", "compact_plan"]
