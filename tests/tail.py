"""The long tail of a matrix of cases is left to the full run (marker ``full``); the default run keeps its representatives."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice, product
from typing import Any

import pytest


def few(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Every case, a tuple of several parameters or one; those that are not ``quick`` come in the full run only."""
    every, chosen = list(cases), list(quick)
    assert chosen and all(case in every for case in chosen), f"not all of {chosen} are among {every}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.full)
        for case in every
    ]


def in_turn(*axes: Iterable[Any], of: Iterable[Any] | None = None) -> list[Any]:
    """Every combination of several axes, of which the default run takes as few as show every value of every axis: the first
    of each together, the second, and so on, where short axes begin anew. A value that is a tuple is several parameters.
    ``of``: the values of the last axis that the default run shows, if not all."""
    every = [list(axis) for axis in axes]
    shown = [*every[:-1], every[-1] if of is None else list(of)]
    assert all(value in every[-1] for value in shown[-1]), f"not all of {shown[-1]} are among {every[-1]}"
    longest = max(map(len, shown))
    chosen = list(zip(*(islice(cycle(axis), longest) for axis in shown), strict=True))
    return [
        pytest.param(
            *(part for value in case for part in (value if isinstance(value, tuple) else (value,))),
            marks=() if case in chosen else pytest.mark.full,
        )
        for case in product(*every)
    ]
