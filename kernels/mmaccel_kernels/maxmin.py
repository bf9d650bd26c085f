"""Max-min selection: tokens picked one by one, each farthest by cosine from those picked before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ._triton import jit, tl, triton
from .copies import first_copies, of_first, pairs_of_first
from .launch import enqueue, run
from .matching import best_match

#: products the definition holds at once
BLOCK = 1 << 22
#: the most tokens whose distances one program keeps in registers
ONE_PROGRAM = 4096
#: tokens, and their channels at a time, of one program of :func:`_step`
TILE = {"BLOCK": 32, "BLOCK_D": 256}


def max_min(x: Tensor, valid: Tensor, count: Tensor, noise: float = 0.0, most: int | None = None) -> Tensor:
    """Greedy max-min selection (Gonzalez 1985; DivPrune, arXiv 2503.02175).

    With ``d(i, j) = 1 - x_i . x_j`` the first pick is ``argmax_i min_{j != i} d(i, j)``, each next one
    ``argmax_i min_{j picked} d(i, j)``. Equal distances go to the lower slot. Vectors that are equal to the bit are at a
    distance of zero, and have the same distances to all others, however the device rounds products.

    All distances are made once where they take no more memory than the vectors (``n <= D``); else a pick costs one product
    ``[n, D] @ [D]``. On a GPU nothing is fetched from the device if ``most`` is given or all distances are made, so the
    selection can be part of a captured graph.

    Parameters
    ----------
    x : ``[N, n, D]`` float32 unit vectors.
    valid : ``[N, n]`` bool; nothing else is picked.
    count : ``[N]`` whole numbers, how many to pick; at most the valid ones.
    noise : distances below it count as zero.
    most : the largest ``count``, where it is known without asking the device.

    Returns
    -------
    ``[N, n]`` bool.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check("max_min", x, valid, count)
    if not x.numel():
        return torch.zeros_like(valid)
    return run(max_min_kernel, max_min_definition, x, valid, count, noise, most)


def max_min_definition(x: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None) -> Tensor:
    """:func:`max_min` in plain torch: a pick is one row of distances, a minimum and an argmax."""
    first = first_copies(x, valid)
    all_pairs = _all_distances(x, first, noise) if has_room(x) else None
    nearest = _of_copies(_nearest(x, valid, noise), first) if all_pairs is None else _nearest_of(all_pairs, valid)
    picked, rows = torch.zeros_like(valid), torch.arange(len(x), device=x.device)
    # minus infinity is the smaller of any two: what is picked or padding stays out
    nearest = nearest.masked_fill(~valid, -torch.inf)
    for i in range(largest(count, most)):
        pick = nearest.argmax(1)
        picked[rows, pick] |= i < count
        if all_pairs is None:
            away = of_first(_distance(torch.bmm(x, x[rows, pick, :, None])[..., 0], noise), first)
            if first is not None:
                away = away.masked_fill(first == first[rows, pick][:, None], 0.0)
        else:
            away = all_pairs[rows, pick]
        nearest[rows, pick] = -torch.inf
        # the first pick's own measure is not a distance to a picked one
        nearest = torch.where(nearest > -torch.inf, away, nearest) if i == 0 else torch.minimum(nearest, away)
    return picked


def max_min_kernel(x: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None) -> Tensor:
    """:func:`max_min` in one launch if all distances are made and fit one program, else in one launch a pick."""
    rows, slots, width = x.shape
    x, count = x.contiguous(), count.to(device=x.device, dtype=torch.int32)
    picked, first = torch.zeros(rows, slots, dtype=torch.uint8, device=x.device), first_copies(x, valid)
    if has_room(x) and slots <= ONE_PROGRAM:
        away = _all_distances(x, first, noise)
        nearest = _nearest_of(away, valid).masked_fill(~valid, -torch.inf)
        size = triton.next_power_of_2(slots)
        warps = max(1, min(16, size // 128))
        enqueue(_pick_all, (rows,), away, nearest, count, picked, slots, BLOCK=size, num_warps=warps)
        return picked.bool()
    cosine, place = best_match(x, x, valid, others=True)
    cosine = cosine.scatter_reduce(1, place, cosine.masked_fill(~valid, -torch.inf), "amax")
    nearest = _of_copies(_distance(cosine, noise), first)
    nearest = nearest.masked_fill(~valid, -torch.inf)
    value, place = block_best(nearest, TILE["BLOCK"])
    blocks = value.shape[-1]
    for turn in range(largest(count, most)):
        enqueue(
            _step, (blocks, rows), x, nearest, value, place, count, picked, turn, slots, width, blocks, noise,
            BLOCKS=triton.next_power_of_2(blocks), **TILE,
        )  # fmt: skip
    return picked.bool()


def max_min_cost(rows: int, slots: int, width: int) -> tuple[int, int]:
    """Bytes that one pick has to move at least without all distances, and its floating-point operations."""
    return rows * 4 * (slots * width + 2 * slots), rows * (2 * slots * width + 2 * slots)


def has_room(x: Tensor) -> bool:
    """Whether all products of ``x [N, n, D]`` take no more memory than ``x``; the answer is the same for every batch."""
    return x.shape[1] <= x.shape[2]


def largest(count: Tensor, most: int | None) -> int:
    """How many picks the row with most gets."""
    return int(count.max()) if most is None else most


def block_best(merit: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The best of every ``size`` of ``merit [N, n]`` and its slot, with room for the next turn's: ``[2, N, blocks]`` each."""
    padded = torch.nn.functional.pad(merit, (0, -merit.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size))
    at = padded.argmax(2, keepdim=True)
    place = at[..., 0] + torch.arange(padded.shape[1], device=at.device) * size
    return padded.gather(2, at)[..., 0].repeat(2, 1, 1), place.int().repeat(2, 1, 1)


def check(name: str, x: Tensor, valid: Tensor, count: Tensor) -> None:
    """Refuse wrong shapes and types by name."""
    if x.dim() != 3 or x.dtype != torch.float32:
        raise ValueError(f"{name} takes x [N, n, D] float32, not {tuple(x.shape)} {x.dtype}.")
    if valid.shape != x.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(
            f"{name} takes valid [N, n] = {tuple(x.shape[:2])} bool, not {tuple(valid.shape)} {valid.dtype}."
        )
    if count.shape != x.shape[:1] or count.is_floating_point():
        raise ValueError(
            f"{name} takes count [N] = {tuple(x.shape[:1])} whole numbers, not {tuple(count.shape)} {count.dtype}."
        )


def _distance(cosine: Tensor, noise: float) -> Tensor:
    away = cosine.neg_().add_(1.0)
    return away.masked_fill_(away < noise, 0.0)


def _all_distances(x: Tensor, first: Tensor | None, noise: float) -> Tensor:
    """``[N, n, n]``, the same for all copies; ``first [N, n]`` are the first of them."""
    return pairs_of_first(_distance(torch.bmm(x, x.transpose(1, 2)), noise), first, 0.0)


def _of_copies(nearest: Tensor, first: Tensor | None) -> Tensor:
    """``nearest [N, n]`` as the first copy has it, and zero where there is more than one."""
    if first is None:
        return nearest
    copy = (first != torch.arange(first.shape[1], device=first.device)).long()
    several = torch.zeros_like(first).scatter_reduce(1, first, copy, "amax").gather(1, first)
    return nearest.gather(1, first).masked_fill(several > 0, 0.0)


def _nearest_of(away: Tensor, valid: Tensor) -> Tensor:
    """``[N, n]``: the distance of every token to the nearest other one, from all ``away [N, n, n]``."""
    own = torch.eye(away.shape[1], dtype=torch.bool, device=away.device)
    away = away.masked_fill(own | ~(valid[:, None] & valid[..., None]), torch.inf)
    # both ways, so that two that are nearest to each other tie
    return torch.minimum(away.amin(2), away.amin(1))


def _nearest(x: Tensor, valid: Tensor, noise: float) -> Tensor:
    """The same from ``x [N, n, D]``, in blocks of rows; a pair of blocks is looked at once, for both."""
    rows, slots = valid.shape
    nearest = torch.full((rows, slots), torch.inf, device=x.device)
    height = max(1, BLOCK // max(1, rows * slots))
    number = torch.arange(slots, device=x.device)
    for top in range(0, slots, height):
        part = slice(top, top + height)
        away = _distance(torch.bmm(x[:, part], x[:, top:].transpose(1, 2)), noise)
        out = (number[part, None] == number[top:]) | ~(valid[:, part, None] & valid[:, None, top:])
        away = away.masked_fill_(out, torch.inf)
        nearest[:, part] = torch.minimum(nearest[:, part], away.amin(2))
        nearest[:, top:] = torch.minimum(nearest[:, top:], away.amin(1))
    return nearest


@jit(do_not_specialize=["slots"])
def _pick_all(away, nearest, count, picked, slots, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    near = tl.load(nearest + row * slots + i, mask=i < slots, other=float("-inf"))
    taken = tl.zeros([BLOCK], tl.int32)
    for turn in range(0, tl.load(count + row)):
        pick = tl.argmax(near, 0)
        taken = tl.where(i == pick, 1, taken)
        far = tl.load(away + (row * slots + pick) * slots + i, mask=i < slots, other=0.0)
        # the first pick's own measure is not a distance to a picked one
        left = tl.where(turn == 0, far, tl.minimum(near, far))
        near = tl.where((i == pick) | (near == float("-inf")), float("-inf"), left)
    tl.store(picked + row * slots + i, taken, mask=i < slots)


@jit
def best_of(value, place, at, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The slot of the best of all blocks, the first of equals, and its value."""
    block = tl.arange(0, BLOCKS)
    best, first = tl.max(tl.load(value + at + block, mask=block < blocks, other=float("-inf")), 0, return_indices=True)
    return tl.load(place + at + first), best


@jit(do_not_specialize=["turn", "slots", "blocks"])
def _step(
    x,
    nearest,
    value,
    place,
    count,
    picked,
    turn,
    slots,
    width,
    blocks,
    noise,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row, rows, block = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(0)
    if turn < tl.load(count + row):
        # every program of a row finds the same pick; what it leaves goes to the other half, for the next turn
        pick, _ = best_of(value, place, (turn % 2 * rows + row) * blocks, blocks, BLOCKS)
        i = block * BLOCK + tl.arange(0, BLOCK)
        cosine, apart = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK_D):
            k = start + tl.arange(0, BLOCK_D)
            here = (i < slots)[:, None] & (k < width)
            mine = tl.load(x + (row * slots + i)[:, None] * width + k, mask=here, other=0.0)
            theirs = tl.load(x + (row * slots + pick) * width + k, mask=k < width, other=0.0)
            cosine += tl.sum(mine * theirs[None, :], 1)
            apart = tl.maximum(apart, tl.max(tl.abs(mine - theirs[None, :]), 1))
        away = tl.where((1.0 - cosine < noise) | (apart == 0.0), 0.0, 1.0 - cosine)
        near = tl.load(nearest + row * slots + i, mask=i < slots, other=float("-inf"))
        left = tl.where(turn == 0, away, tl.minimum(near, away))
        near = tl.where((i == pick) | (near == float("-inf")), float("-inf"), left)
        tl.store(nearest + row * slots + i, near, mask=i < slots)
        tl.store(picked + row * slots + i, 1, mask=i == pick)
        leave = ((turn + 1) % 2 * rows + row) * blocks + block
        tl.store(value + leave, tl.max(near, 0))
        tl.store(place + leave, block * BLOCK + tl.argmax(near, 0))
