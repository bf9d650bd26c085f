"""Greedy determinantal selection: tokens picked one by one, each adding most to the determinant of those picked."""

from __future__ import annotations

import torch
from torch import Tensor

from ._triton import jit, tl, triton
from .copies import first_copies, of_first, pairs_of_first
from .launch import enqueue, run
from .maxmin import best_of, block_best, check, has_room, largest

#: tokens, and their channels or picks at a time, of one program
TILE = {"BLOCK": 32, "BLOCK_D": 256, "BLOCK_P": 64}


def greedy_dpp(
    x: Tensor, quality: Tensor, valid: Tensor, count: Tensor, noise: float = 0.0, most: int | None = None
) -> Tensor:
    """Greedy maximum a posteriori of a determinantal point process (Chen et al. 2018, arXiv 1709.05135; CDPruner).

    With ``L_ij = q_i (x_i . x_j) q_j``: ``argmax_j d_j``, where ``d`` starts as the diagonal of ``L`` and every pick ``i``
    subtracts ``e_j^2``, ``e_j = (L_ij - sum_k c_ki c_kj) / sqrt(d_i)``, ``c_k`` being the ``e`` of the picks before. Equal ones
    go to the lower slot. Tokens that the picked ones span already follow behind all others, by their quality. Tokens whose
    vector and quality are equal to the bit stay equal, however the device rounds products.

    All products of vectors are made once where they take no more memory than the vectors (``n <= D``); else a pick costs
    one product ``[n, D] @ [D]``. ``most x n`` numbers are stored. On a GPU a pick is one launch, and nothing is fetched from
    the device if ``most`` is given.

    Parameters
    ----------
    x : ``[N, n, D]`` float32 unit vectors, or zeros.
    quality : ``[N, n]`` float32, not negative.
    valid : ``[N, n]`` bool; nothing else is picked.
    count : ``[N]`` whole numbers, how many to pick; at most the valid ones.
    noise : a token is spanned when its ``d`` has fallen to this share of where it started.
    most : the largest ``count``, where it is known without asking the device.

    Returns
    -------
    ``[N, n]`` bool.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check("greedy_dpp", x, valid, count)
    if quality.shape != valid.shape or quality.dtype != torch.float32:
        raise ValueError(
            f"greedy_dpp takes quality [N, n] = {tuple(valid.shape)} float32, not {tuple(quality.shape)} {quality.dtype}."
        )
    if not x.numel():
        return torch.zeros_like(valid)
    return run(greedy_dpp_kernel, greedy_dpp_definition, x, quality, valid, count, noise, most)


def greedy_dpp_definition(
    x: Tensor, quality: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None
) -> Tensor:
    """:func:`greedy_dpp` in plain torch."""
    first = _first(x, quality)
    all_pairs = pairs_of_first(torch.bmm(x, x.transpose(1, 2)), first) if has_room(x) else None
    left = quality * x.square().sum(-1) * quality
    least, spent = left * noise, (-1.0 / (1.0 + quality)).masked_fill(~valid, -torch.inf)
    left = left.masked_fill(~valid, -torch.inf)
    picked, rows = torch.zeros_like(valid), torch.arange(len(x), device=x.device)
    turns = largest(count, most)
    basis = x.new_zeros(len(x), turns, x.shape[1])
    for i in range(turns):
        merit = torch.where(left > least, left, spent)
        pick = merit.argmax(1)
        best = merit[rows, pick][:, None]
        picked[rows, pick] |= i < count
        cosine = torch.bmm(x, x[rows, pick, :, None])[..., 0] if all_pairs is None else all_pairs[rows, pick]
        e = quality * cosine * quality[rows, pick][:, None]
        e = of_first(e - torch.bmm(basis[rows, :i, pick][:, None], basis[:, :i])[:, 0], first)
        # what is spanned has a negative merit, and nothing new to subtract
        basis[:, i] = torch.where(best > 0, e / best.clamp(min=torch.finfo(torch.float32).tiny).sqrt(), 0.0)
        left = left - basis[:, i].square()
        left[rows, pick] = spent[rows, pick] = -torch.inf
    return picked


def greedy_dpp_kernel(
    x: Tensor, quality: Tensor, valid: Tensor, count: Tensor, noise: float, most: int | None
) -> Tensor:
    """:func:`greedy_dpp` in one launch a pick."""
    rows, slots, width = x.shape
    x, quality, count = x.contiguous(), quality.contiguous(), count.to(device=x.device, dtype=torch.int32)
    pairs = pairs_of_first(torch.bmm(x, x.transpose(1, 2)), _first(x, quality)) if has_room(x) else None
    left = quality * x.square().sum(-1) * quality
    least, spent = left * noise, -1.0 / (1.0 + quality)
    merit = torch.where(left > least, left, spent).masked_fill(~valid, -torch.inf)
    left = left.masked_fill(~valid, -torch.inf)
    value, place = block_best(merit, TILE["BLOCK"])
    blocks, turns = value.shape[-1], largest(count, most)
    picked = torch.zeros(rows, slots, dtype=torch.uint8, device=x.device)
    basis = torch.empty(rows, turns, slots, device=x.device)
    for turn in range(turns):
        enqueue(
            _step, (blocks, rows), x if pairs is None else pairs, quality, left, least, basis, value, place, count, picked,
            turn, turns, slots, width, blocks,
            PAIRS=pairs is not None, BLOCKS=triton.next_power_of_2(blocks), **TILE,
        )  # fmt: skip
    return picked.bool()


def _first(x: Tensor, quality: Tensor) -> Tensor | None:
    """``[N, n]`` long: the first token with the vector and the quality of each."""
    return first_copies(torch.cat([x, quality[..., None]], 2))


def greedy_dpp_cost(rows: int, slots: int, width: int, turn: int) -> tuple[int, int]:
    """Bytes that pick ``turn`` has to move at least without all products, and its floating-point operations."""
    return rows * 4 * (slots * (width + turn) + 5 * slots), rows * (2 * slots * (width + turn) + 5 * slots)


@jit(do_not_specialize=["turn", "turns", "slots", "blocks"])
def _step(
    x,
    quality,
    left,
    least,
    basis,
    value,
    place,
    count,
    picked,
    turn,
    turns,
    slots,
    width,
    blocks,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row, rows, block = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(0)
    if turn < tl.load(count + row):
        # every program of a row finds the same pick; what it leaves goes to the other half, for the next turn
        pick, best = best_of(value, place, (turn % 2 * rows + row) * blocks, blocks, BLOCKS)
        i = block * BLOCK + tl.arange(0, BLOCK)
        here, at = i < slots, row * slots + i
        if PAIRS:
            cosine = tl.load(x + (row * slots + pick) * slots + i, mask=here, other=0.0)
        else:
            cosine = tl.zeros([BLOCK], tl.float32)
            for start in range(0, width, BLOCK_D):
                k = start + tl.arange(0, BLOCK_D)
                mine = tl.load(x + at[:, None] * width + k, mask=here[:, None] & (k < width), other=0.0)
                theirs = tl.load(x + (row * slots + pick) * width + k, mask=k < width, other=0.0)
                cosine += tl.sum(mine * theirs[None, :], 1)
        spanned = tl.zeros([BLOCK], tl.float32)
        for start in range(0, turn, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            ours = basis + (row * turns + p) * slots
            theirs = tl.load(ours + pick, mask=p < turn, other=0.0)
            mine = tl.load(ours[:, None] + i, mask=(p < turn)[:, None] & here, other=0.0)
            spanned += tl.sum(theirs[:, None] * mine, 0)
        own = tl.load(quality + at, mask=here, other=0.0)
        e = own * cosine * tl.load(quality + row * slots + pick) - spanned
        # what is spanned has a negative merit, and nothing new to subtract
        e = tl.where(best > 0, e / tl.sqrt(tl.where(best > 0, best, 1.0)), 0.0)
        tl.store(basis + (row * turns + turn) * slots + i, e, mask=here)
        rest = tl.load(left + at, mask=here, other=float("-inf")) - e * e
        rest = tl.where(i == pick, float("-inf"), rest)
        tl.store(left + at, rest, mask=here)
        tl.store(picked + at, 1, mask=i == pick)
        merit = tl.where(rest > tl.load(least + at, mask=here, other=0.0), rest, -1.0 / (1.0 + own))
        merit = tl.where(rest == float("-inf"), float("-inf"), merit)
        leave = ((turn + 1) % 2 * rows + row) * blocks + block
        tl.store(value + leave, tl.max(merit, 0))
        tl.store(place + leave, block * BLOCK + tl.argmax(merit, 0))
