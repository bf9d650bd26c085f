"""Bipartite matching: for every vector of one set the best of another, without the matrix of their products."""

from __future__ import annotations

import torch
from torch import Tensor

from ._triton import jit, tl, triton
from .copies import first_copies, of_first
from .launch import enqueue, run

#: products the definition holds at once; they fit a core's cache, and the kernel holds one tile
BLOCK = 1 << 20


def best_match(x: Tensor, y: Tensor, there: Tensor | None = None, *, others: bool = False) -> tuple[Tensor, Tensor]:
    """The largest product of every row of ``x`` with a row of ``y``, and where it is.

    With unit vectors this is the proposal step of bipartite soft matching (ToMe, arXiv 2210.09461).

    Parameters
    ----------
    x : ``[N, a, D]`` float16, bfloat16 or float32; products are summed in float32.
    y : ``[N, b, D]``, of the same type.
    there : ``[N, b]`` bool, the rows of ``y`` that count; by default all.
    others : row ``i`` of ``x`` is not matched with row ``i`` of ``y``; for sets matched with themselves.

    Returns
    -------
    ``[N, a]`` float32 and ``[N, a]`` long. Equal products go to the lower place; where nothing is to be matched, minus
    infinity and 0. Unless ``others``, rows that are equal to the bit have the same products, however the device rounds.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    _check(x, y, there)
    score, place = _matched(x, y, there, others)
    if others or not y.shape[1]:
        # copies differ in which other one they may match
        return score, place
    mine, theirs = first_copies(x), first_copies(y, there)
    place = of_first(place, mine)
    return of_first(score, mine), place if theirs is None else theirs.gather(1, place)


def most_alike(
    x: Tensor, a: Tensor, b: Tensor, there: Tensor | None = None, *, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`best_match` of some of the unit vectors ``x [N, n, D]`` with others, by cosine: ``a [N, p]`` and ``b [N, q]`` are
    slots of ``x``, and ``first`` is what :func:`first_copies` says of ``x``.

    No cosine is above one, and that of a vector and its copy is one, so that all pairs of copies tie.
    """
    row = torch.arange(len(x), device=x.device)[:, None]
    score, place = _matched(x[row, a], x[row, b], there, False)
    score = score.clamp(max=1.0)
    if first is None or not b.shape[1]:
        return score, place
    mine, theirs = first.gather(1, a), first.gather(1, b)
    here, home = _first_places(mine, x.shape[1], None), _first_places(theirs, x.shape[1], there)
    lead = here.gather(1, mine)
    score, place = score.gather(1, lead), place.gather(1, lead)
    none, twin = b.shape[1], home.gather(1, mine)
    place = torch.where(score > -torch.inf, home.gather(1, theirs.gather(1, place)), place)
    # a vector of zeros has no direction
    copy = (twin < none) & (score > 0)
    return score.masked_fill(copy, 1.0), torch.where(copy, twin, place)


def _first_places(name: Tensor, names: int, there: Tensor | None) -> Tensor:
    """``[N, names]`` long: the first place of ``name [N, p]`` that is there and has each name; ``p`` for none."""
    place = torch.arange(name.shape[1], device=name.device).expand_as(name)
    if there is not None:
        place = place.masked_fill(~there, name.shape[1])
    return place.new_full((len(name), names), name.shape[1]).scatter_reduce(1, name, place, "amin")


def _matched(x: Tensor, y: Tensor, there: Tensor | None, others: bool) -> tuple[Tensor, Tensor]:
    if not x.numel() or not y.shape[1]:
        return best_match_definition(x, y, there, others)
    return run(best_match_kernel, best_match_definition, x, y, there, others)


def best_match_definition(x: Tensor, y: Tensor, there: Tensor | None, others: bool) -> tuple[Tensor, Tensor]:
    """:func:`best_match` in plain torch, in blocks of rows."""
    rows, a, b = len(x), x.shape[1], y.shape[1]
    score = torch.full((rows, a), -torch.inf, device=x.device)
    place = torch.zeros(rows, a, dtype=torch.long, device=x.device)
    against, number = y.float().transpose(1, 2), torch.arange(b, device=x.device)
    height = max(1, BLOCK // max(1, rows * b))
    for top in range(0, a if b else 0, height):
        product = torch.bmm(x[:, top : top + height].float(), against)
        if there is not None:
            product = product.masked_fill_(~there[:, None], -torch.inf)
        if others:
            own = torch.arange(top, top + product.shape[1], device=x.device)[:, None] == number
            product = product.masked_fill_(own, -torch.inf)
        # argmax takes the first of equals, max leaves open which
        at = product.argmax(2, keepdim=True)
        place[:, top : top + height] = at[..., 0]
        score[:, top : top + height] = product.gather(2, at)[..., 0]
    return score, place


def best_match_kernel(x: Tensor, y: Tensor, there: Tensor | None, others: bool) -> tuple[Tensor, Tensor]:
    """:func:`best_match` in one launch: a program keeps a block of rows of ``x`` and streams ``y``."""
    rows, a, width = x.shape
    x, y = x.contiguous(), y.contiguous()
    score = torch.empty(rows, a, device=x.device)
    place = torch.empty(rows, a, dtype=torch.long, device=x.device)
    mask = y if there is None else there.contiguous().view(torch.uint8)
    tile = tiles(x.element_size())
    grid = (triton.cdiv(a, tile["BLOCK_A"]), rows)
    enqueue(_best_match, grid, x, y, mask, score, place, a, y.shape[1], width, there is not None, others, **tile)
    return score, place


def tiles(bytes_each: int) -> dict[str, int]:
    """The tile sizes that are shipped, by the size of a number: full float32 products leave no room for larger ones."""
    side = 64 if bytes_each == 4 else 128
    return {"BLOCK_A": side, "BLOCK_B": side, "BLOCK_D": 32, "num_warps": 4 if bytes_each == 4 else 8}


def best_match_cost(rows: int, a: int, b: int, width: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that a launch has to move at least, and its floating-point operations."""
    return rows * ((a + b) * width * bytes_each + a * (4 + 8)), 2 * rows * a * b * width


def _check(x: Tensor, y: Tensor, there: Tensor | None) -> None:
    if x.dim() != 3 or y.dim() != 3 or len(x) != len(y) or x.shape[2] != y.shape[2]:
        raise ValueError(f"best_match takes x [N, a, D] and y [N, b, D], not {tuple(x.shape)} and {tuple(y.shape)}.")
    if x.dtype != y.dtype or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"best_match takes float16, bfloat16 or float32, x and y alike, not {x.dtype} and {y.dtype}.")
    if there is not None and (there.shape != y.shape[:2] or there.dtype != torch.bool):
        raise ValueError(
            f"best_match takes there [N, b] = {tuple(y.shape[:2])} bool, not {tuple(there.shape)} {there.dtype}."
        )


@jit(do_not_specialize=["a", "b"])
def _best_match(
    x,
    y,
    there,
    score,
    place,
    a,
    b,
    width,
    MASKED: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    k = tl.arange(0, BLOCK_D)
    mine = x + (row * a + i)[:, None] * width + k
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK_A], tl.int32)
    for left in range(0, b, BLOCK_B):
        j = left + tl.arange(0, BLOCK_B)
        theirs = y + (row * b + j)[None, :] * width + k[:, None]
        product = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
        for start in range(0, width, BLOCK_D):
            inside = k < width - start
            part = tl.load(mine + start, mask=(i < a)[:, None] & inside, other=0.0)
            other = tl.load(theirs + start, mask=(j < b)[None, :] & inside[:, None], other=0.0)
            product = tl.dot(part, other, product, input_precision="ieee")
        # added, not chosen: one predicate a product would not fit AMD's scalar registers
        shut = tl.where(j < b, 0.0, float("-inf"))
        if MASKED:
            shut = tl.where(tl.load(there + row * b + j, mask=j < b, other=0) != 0, 0.0, float("-inf"))
        product += shut[None, :]
        if OTHERS:
            product = tl.where(i[:, None] == j[None, :], float("-inf"), product)
        top, at = tl.max(product, 1, return_indices=True)
        # strictly better: of equals the lower place was there first
        where = tl.where(top > best, left + at, where)
        best = tl.maximum(best, top)
    tl.store(score + row * a + i, best, mask=i < a)
    tl.store(place + row * a + i, where, mask=i < a)
