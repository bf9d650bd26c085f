"""An option outside of its limit is refused with its name, its value and what is allowed."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, Literal

import numpy as np
import pytest
from torch import Tensor

from mmaccel.core.reduction import Reduction
from mmaccel.errors import MmaccelError
from mmaccel.method import ProjectorMethod, TokenBatch, register
from mmaccel.method.limits import limits_of
from mmaccel.method.registry import get_method, methods


class Bare(ProjectorMethod):
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        raise NotImplementedError


class Toy(Bare):
    name = "toy"
    limits = {"tau": "(0, inf)", "share": "[0, 1)", "kernel": "odd", "pool": "odd or 0", "layers": "not empty"}


@dataclass(frozen=True)
class Options(Toy):
    limits = {"heads": "[1, inf) or (0.0, 1.0]", "bits": (1.5, 2)}

    tau: float | None = 0.1
    share: float = 0.5
    kernel: int = 3
    pool: int = 0
    layers: tuple[int, ...] = (0,)
    bits: float = 2
    heads: float = 1.0
    mode: Literal["sum", "mean"] = "sum"


FITS = (
    ("tau", (1e-9, 1e9, None)),
    ("share", (0, 0.0, 0.999)),
    ("kernel", (1, 3, 31)),
    ("pool", (0, 1, 5)),
    ("layers", ((0,), (None,))),
    ("bits", (1.5, 2, 2.0)),
    ("heads", (1, 100, 1.0, 1e-9, np.float32(0.5))),
    ("mode", ("sum", "mean")),
)
REFUSED = (
    ("tau", (0, 0.0, -1.0, float("nan"), True, "1"), "greater than 0"),
    ("share", (-0.1, 1, 1.0, float("nan"), None), "at least 0 and less than 1"),
    ("kernel", (0, 2, -1, 1.5), "an odd number"),
    ("pool", (-1, 2, -3), "an odd number or 0"),
    ("layers", ((), 5, None), "a tuple of one or more values"),
    ("bits", (1, 1.58, None), "1.5 or 2"),
    ("heads", (0, -1, 0.0, 1.5, True), "an int, at least 1, or a share (float), greater than 0.0 and at most 1.0"),
    ("mode", ("max", "", None), "'sum' or 'mean'"),
)


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, values in FITS for value in values])
def test_values_within_their_limits_are_taken(option: str, value: Any) -> None:
    assert getattr(Options(**{option: value}), option) == value


@pytest.mark.parametrize(
    ("option", "value", "allowed"), [(name, value, words) for name, values, words in REFUSED for value in values]
)
def test_other_values_are_refused(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(MmaccelError, match=re.escape(f"`{option}` of toy must be {allowed}, got {value!r}.")):
        Options(**{option: value})


def test_true_is_no_number_among_values() -> None:
    with pytest.raises(MmaccelError, match="`bits` of calibquant must be 1, 2, 4 or 8, got True."):
        get_method("calibquant")(bits=True)  # type: ignore[call-arg]


def test_every_limit_is_that_of_an_option() -> None:
    for kind in methods().values():
        names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
        assert set(limits_of(kind)) <= names, kind.name
        for limit in limits_of(kind).values():
            assert isinstance(limit, tuple) or re.fullmatch(
                r"odd|odd or 0|not empty|[\[(].+, .+[\])]( or [\[(].+, .+[\])])?", limit
            )


def test_register_makes_a_frozen_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmaccel.method.registry._methods", {})

    @register
    class Plain(Bare):
        name = "plain"
        order: float = 2.0

    @register
    class Own(Bare):
        name = "own"

        def __init__(self, order: float) -> None:
            self.order = order

    assert Plain(order=1.0).options() == {"order": 1.0} and Plain(1.0) == Plain(1.0) != Plain()
    with pytest.raises(FrozenInstanceError):
        Plain().order = 1.0  # type: ignore[misc]
    assert Own(3.0).order == 3.0
