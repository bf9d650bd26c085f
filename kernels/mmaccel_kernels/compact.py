"""Compaction: the kept keys and values of every head, moved together in one launch, merged or as they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._triton import has_kernel, jit, tl, triton

#: output rows, and channels at a time, of one program
TILE = {"BLOCK": 16, "BLOCK_D": 128}


class Compacted(NamedTuple):
    """Heads that store different counts, one after the other: ``[total, D]``, ``[total, Dv]``, and lengths ``[B, H]``."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


def compact(
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
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
        ends of short lists.
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
    if kept.dtype != torch.bool:
        # one column more takes the ends of short lists
        found = torch.zeros(*keys.shape[:2], keys.shape[2] + 1, dtype=torch.bool, device=kept.device)
        kept = found.scatter_(2, kept.long() % (keys.shape[2] + 1), True)[..., :-1]
    run = compact_kernel if has_kernel(keys) else compact_definition
    return run(keys, values, kept, owner, weight, total)


def compact_definition(
    keys: Tensor, values: Tensor, kept: Tensor, owner: Tensor | None, weight: Tensor | None, total: int | None
) -> Compacted:
    """:func:`compact` in plain torch."""
    if owner is None:
        if total is None:
            return Compacted(keys[kept], values[kept], kept.sum(-1))
        source = _plan(kept, None, total)[0][:total]
        return Compacted(keys.flatten(0, 2)[source], values.flatten(0, 2)[source], kept.sum(-1))
    source, begin = _plan(kept, owner, int(kept.sum()) if total is None else total)
    factor = torch.ones_like(source, dtype=torch.float32) if weight is None else weight.flatten()[source]

    def summed(x: Tensor) -> Tensor:
        parts = x.flatten(0, 2)[source[: int(begin[-1])]].float() * factor[: int(begin[-1]), None]
        if not len(begin) - 1:
            return x.new_zeros(0, x.shape[-1])
        # sums in a fixed order, without atomics
        return torch.segment_reduce(parts, "sum", lengths=begin.diff(), axis=0, unsafe=True, initial=0.0).to(x.dtype)

    return Compacted(summed(keys), summed(values), kept.sum(-1))


def compact_kernel(
    keys: Tensor, values: Tensor, kept: Tensor, owner: Tensor | None, weight: Tensor | None, total: int | None
) -> Compacted:
    """:func:`compact` in one launch: a program makes a few rows of the output, keys and values."""
    total = int(kept.sum()) if total is None else total
    keys, values = keys.contiguous(), values.contiguous()
    out = Compacted(keys.new_empty(total, keys.shape[-1]), values.new_empty(total, values.shape[-1]), kept.sum(-1))
    if total == 0:
        return out
    source, begin = _plan(kept, owner, total)
    factor = keys if weight is None else weight.contiguous()
    _compact[(triton.cdiv(total, TILE["BLOCK"]),)](
        keys, values, source, begin, factor, out.keys, out.values, total, keys.shape[-1], values.shape[-1],
        MERGE=owner is not None, WEIGHED=weight is not None, **TILE, num_warps=4,
    )  # fmt: skip
    return out


def compact_cost(total: int, members: int, width: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that a launch has to move at least for ``total`` outputs made of ``members`` inputs, ``width`` channels of keys and
    values together, and its floating-point operations; weights and indices included, of a merge."""
    return bytes_each * width * (members + total) + members * (8 + 4) + 8 * (total + 1), 2 * members * width


def _plan(kept: Tensor, owner: Tensor | None, total: int) -> tuple[Tensor, Tensor]:
    """The input rows of every output row, ``source [rows]`` long, of which output ``o`` takes ``begin[o]`` to ``begin[o + 1]``;
    made on the device without asking it."""
    flat = kept.flatten()
    rank = flat.cumsum(0) - 1
    if owner is None:
        row = torch.arange(len(flat), device=flat.device)
        source = row.new_empty(total + 1).scatter_(0, torch.where(flat, rank, total), row)
        return source, torch.arange(total + 1, device=flat.device)
    head = torch.arange(0, len(flat), kept.shape[-1], device=flat.device).view(*kept.shape[:2], 1)
    onto = torch.where(owner >= 0, rank[(owner.clamp(min=0) + head).flatten()].view_as(owner), total).flatten()
    begin = torch.searchsorted(onto.sort().values, torch.arange(total + 1, device=flat.device))
    return onto.argsort(stable=True), begin


def _check(keys: Tensor, values: Tensor, kept: Tensor, owner: Tensor | None, weight: Tensor | None) -> None:
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"compact takes keys [B, H, K, D] and values [B, H, K, Dv], not {tuple(keys.shape)} and {tuple(values.shape)}."
        )
    if keys.dtype != values.dtype or keys.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"compact takes keys and values of one type, of 16, 32 or 64 bits, not {keys.dtype} and {values.dtype}."
        )
    shape = tuple(keys.shape[:3])
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


@jit(do_not_specialize=["total"])
def _compact(
    keys,
    values,
    source,
    begin,
    weight,
    new_keys,
    new_values,
    total,
    key_width,
    value_width,
    MERGE: tl.constexpr,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # type: ignore[no-untyped-def]
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for both in tl.static_range(2):
        x, out, width = (keys, new_keys, key_width) if both == 0 else (values, new_values, value_width)
        for start in range(0, width, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            inside = (o < total)[:, None] & (d < width)
            if MERGE:
                first = tl.load(begin + o, mask=o < total, other=0)
                last = tl.load(begin + o + 1, mask=o < total, other=0)
                made = tl.zeros([BLOCK, BLOCK_D], tl.float32)
                for turn in range(0, tl.max(last - first, 0)):
                    member = first + turn < last
                    row = tl.load(source + first + turn, mask=member, other=0)
                    here = member[:, None] & (d < width)
                    part = tl.load(x + row[:, None] * width + d, mask=here, other=0.0).to(tl.float32)
                    if WEIGHED:
                        part *= tl.load(weight + row, mask=member, other=0.0)[:, None]
                    made += part
            else:
                row = tl.load(source + o, mask=o < total, other=0)
                made = tl.load(x + row[:, None] * width + d, mask=inside, other=0.0)
            tl.store(out + o[:, None] * width + d, made, mask=inside)
