"""Whether an earlier choice stands, as a Triton program: a program looks at one row."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl
from ..launch import enqueue

#: entries that a program looks at together
BLOCK = 1024


def keep_alike_kernel(
    query: Tensor, units: Tensor, before: Tensor, before_units: Tensor, alike: float
) -> tuple[Tensor, Tensor]:
    """:func:`.keep_alike` in one launch."""
    query, units, before, before_units = (x.contiguous() for x in (query, units, before, before_units))
    now, kept = torch.empty_like(before), torch.empty_like(units)
    enqueue(
        _keep_alike, (len(query),), query, units, before, before_units, now, kept, alike, units[0].numel(),
        SIZE=before.shape[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return now, kept


@jit(do_not_specialize=["alike", "number"])
def _keep_alike(
    query, units, before, before_units, now, kept, alike, number, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    square = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        q = tl.load(query + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        square += q * q
        product += q * tl.load(before + row * SIZE + i, mask=i < SIZE, other=0.0)
    length = tl.maximum(tl.sqrt(tl.sum(square, 0)), 1e-12)
    same = tl.sum(product, 0) / length >= alike
    for start in range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        q = tl.load(query + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32) / length
        old = tl.load(before + row * SIZE + i, mask=i < SIZE, other=0.0)
        tl.store(now + row * SIZE + i, tl.where(same, old, q), mask=i < SIZE)
    for start in range(0, number, BLOCK):
        i = start + tl.arange(0, BLOCK)
        old = tl.load(before_units + row * number + i, mask=i < number, other=0)
        new = tl.load(units + row * number + i, mask=i < number, other=0)
        tl.store(kept + row * number + i, tl.where(same, old, new), mask=i < number)
