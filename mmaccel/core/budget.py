"""Budgets: how many visual tokens stay, as exact integers per picture and per unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import MmaccelError

if TYPE_CHECKING:
    from torch import Tensor

#: a float is a ratio, an int a count (to a type checker every int is a float)
Retain = float


def check_retain(retain: Retain, what: str = "retain") -> Retain:
    """Return ``retain`` if it is valid: a float in (0, 1] is a ratio, an int of 1 or more a count.

    Raises :class:`MmaccelError` if it is zero, negative, a ratio above 1.0, or not a number.
    """
    if isinstance(retain, bool) or not isinstance(retain, (int, float)) or retain != retain:
        raise MmaccelError(f"{what}={retain!r} is not a budget; give a ratio such as 0.25 or a count such as 64.")
    if isinstance(retain, int):
        if retain < 1:
            raise MmaccelError(f"{what}={retain} keeps no token; give a count of 1 or more, or a ratio such as 0.25.")
    elif not 0.0 < retain <= 1.0:
        hint = f" (for a count of tokens write {what}={int(retain)})" if 2 <= retain < float("inf") else ""
        raise MmaccelError(f"{what}={retain} is outside (0, 1]; a ratio is the share of tokens to keep{hint}.")
    return retain


def budget_text(retain: Retain) -> str:
    """A budget as unambiguous text: ``1`` is a count, ``1.0`` a ratio."""
    if isinstance(retain, int):
        return str(int(retain))
    short = f"{retain:g}" if float(f"{retain:g}") == retain else repr(float(retain))
    return f"{short}.0" if short.isdigit() else short


def resolve(retain: Retain, size: int) -> int:
    """Number of ``size`` tokens that stay: the ratio rounded half up, at least one; or the count, at most all."""
    if isinstance(retain, int):
        return min(retain, size)
    # exact arithmetic: 0.29 * 100 is 28.999999999999996 in floating point
    return max(1, int(Fraction(str(retain)) * size + Fraction(1, 2)))


def check_age(age: Any, what: str = "age") -> tuple[float, ...]:
    """Return shares by age as a tuple. Raises :class:`MmaccelError` unless they are two or more numbers from 0 to 1 that never
    rise."""
    shares = tuple(age) if isinstance(age, Sequence) and not isinstance(age, (str, bytes)) else ()
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) and 0 <= one <= 1 for one in shares)
    if len(shares) < 2 or not numbers or any(a < b for a, b in pairwise(shares)):
        raise MmaccelError(
            f"`{what}` must be two or more shares from 0 to 1 that never rise, such as (1.0, 0.25, 0.05, 0), got {age!r:.80}."
        )
    return shares


def shares_by_age(count: int, age: Sequence[float], step: int) -> list[float]:
    """The share of its tokens that each of ``count`` pictures keeps, the oldest first. Pictures are counted in groups of
    ``step``, of which the last may be incomplete; those of the newest group keep ``age[0]``, those of the group before it
    ``age[1]``, and so on, and all older ones the last."""
    newest = (count - 1) // step
    return [age[min(newest - number // step, len(age) - 1)] for number in range(count)]


def kept_whole(name: str, retain: Retain, sizes: list[int], what: str = "pictures or clips") -> list[str]:
    """Note for the stage ``name`` if a count exceeds some of ``sizes``, which are kept whole; else empty."""
    small = [size for size in sizes if isinstance(retain, int) and size < retain]
    if not small:
        return []
    return [
        f"{name} was asked to keep {retain} tokens and keeps all of {len(small)} of {len(sizes)} {what}, which have at most "
        f"{max(small)}"
    ]


def apportion(total: int, sizes: list[int], shares: list[float] | None = None) -> list[int]:
    """Distribute ``total`` over parts of the given sizes, in proportion to ``shares`` (default: the sizes).

    The parts with the largest remainders are rounded up, so that all sum to ``total`` exactly (to the sum of the sizes, if
    that is less). No part exceeds its size; what does not fit goes to the others.
    """
    left, out = min(total, sum(sizes)), [0] * len(sizes)
    weight = [Fraction(str(s)) for s in (shares if shares is not None else sizes)]
    while left:
        free = [i for i, size in enumerate(sizes) if out[i] < size]
        scale = sum(weight[i] for i in free)
        ideal = {i: left * weight[i] / scale if scale else Fraction(left, len(free)) for i in free}
        given = {i: min(int(ideal[i]), sizes[i] - out[i]) for i in free}
        rest = left - sum(given.values())
        for i in sorted(free, key=lambda i: (int(ideal[i]) - ideal[i], i))[:rest]:
            if given[i] < sizes[i] - out[i]:
                given[i] += 1
        for i in free:
            out[i] += given[i]
        left -= sum(given.values())
    return out


def counts(
    retain: Retain,
    original: list[int],
    present: list[int],
    picture: list[int],
    least: Retain | None = None,
    rounding: Callable[[Retain, int, tuple[int, int, int] | None], int] | None = None,
    grids: list[tuple[int, int, int]] | None = None,
) -> Tensor:
    """Number of tokens that one stage keeps of every unit (segment, tile or picture), ``[N]`` long on the CPU.

    retain : ratio of the *original* tokens, or a count, per picture or clip; one that has fewer is kept whole.
    original, present : tokens each unit had at first and has now.
    picture : which picture or clip each unit belongs to; the budget of a picture is apportioned to its units.
    least : the budget of a later stage; this one keeps at least as many tokens.
    rounding : how a ratio of a picture becomes a whole number, at least one; default :func:`resolve`. It is given the ratio,
        the size, and the grid of a picture that is one unit.
    grids : (t, h, w) of each unit.
    """
    # recipes check their budgets where nothing else needs torch
    import torch

    out = torch.zeros(len(present), dtype=torch.long)
    for p in dict.fromkeys(picture):
        units = [i for i, q in enumerate(picture) if q == p]
        size = sum(original[i] for i in units)
        if rounding is None or isinstance(retain, int):
            total = resolve(retain, size)
        else:
            total = max(1, rounding(retain, size, grids[units[0]] if grids and len(units) == 1 else None))
        total = total if least is None else max(total, resolve(least, size))
        out[units] = torch.tensor(apportion(total, [present[i] for i in units]))
    return out


def layer_at(layer: float, depth: int) -> int:
    """The layer of a number, or of a share of the ``depth``, rounded half up."""
    return layer if isinstance(layer, int) else int(layer * depth + 0.5)
