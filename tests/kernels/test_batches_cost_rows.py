"""Picking from several pictures on a CPU costs each what it costs alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import selection
import torch
from mmaccel_kernels.dpp import greedy_dpp
from mmaccel_kernels.matching import best_match
from mmaccel_kernels.maxmin import max_min
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel import get_method
from mmaccel.method import TokenBatch, TokenMethod


def _max_min(x: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    return max_min(x, valid, count)


def _dpp(x: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    return greedy_dpp(x, 0.5 + x[..., 0].abs(), valid, count)


def _match(x: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    return best_match(x, x, valid, others=True)[1]


PICKS = pytest.mark.parametrize("pick", [_max_min, _dpp, _match])
#: slots and width: products are made pick by pick where there are more slots than channels
SHAPES = pytest.mark.parametrize(("slots", "width"), [(24, 32), (96, 16)])


def vectors(rows: int, slots: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.nn.functional.normalize(
        torch.randn(rows, slots, width, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    return x, torch.ones(rows, slots, dtype=torch.bool), torch.full((rows,), slots // 4)


class BatchedVectors(TorchDispatchMode):
    """Counts batched products of matrices and vectors, which take a CPU several times as long as one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            (rows, height, _), width = args[0].shape, args[1].shape[2]
            self.seen += rows > 1 and min(height, width) == 1
        return func(*args, **(kwargs or {}))


@PICKS
@SHAPES
def test_no_product_is_one_of_a_batch_of_vectors(pick: Callable[..., Tensor], slots: int, width: int) -> None:
    with BatchedVectors() as counted:
        pick(*vectors(4, slots, width))
    assert counted.seen == 0


@PICKS
@SHAPES
def test_a_row_is_picked_from_as_alone(pick: Callable[..., Tensor], slots: int, width: int) -> None:
    x, valid, count = vectors(5, slots, width)
    alone = [pick(x[i : i + 1], valid[i : i + 1], count[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(pick(x, valid, count), torch.cat(alone))


def test_rows_that_do_not_fit_a_cache_are_picked_from_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    given = vectors(5, 96, 16)
    for pick in (_max_min, _dpp):
        together = pick(*given)
        monkeypatch.setattr("mmaccel_kernels.greedy.CACHED", 2 * 96 * 16)
        assert torch.equal(pick(*given), together)
        monkeypatch.undo()


@pytest.mark.full
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="its seconds need a quiet machine; run it with -n 0")
@pytest.mark.parametrize("pick", [_max_min, _dpp, _match])
@pytest.mark.parametrize(("slots", "width"), [(576, 256), (576, 1024), (2048, 512)])
def test_a_picture_takes_as_long_in_a_batch_as_alone(pick: Callable[..., Tensor], slots: int, width: int) -> None:
    """Seconds of this process, the least of runs in turn, since other processes share the memory."""
    taken: dict[int, list[float]] = {1: [], 2: [], 8: []}
    for _ in range(5):
        for rows, seconds in taken.items():
            given = vectors(rows, slots, width)
            begun = time.process_time()
            pick(*given)
            seconds.append((time.process_time() - begun) / rows)
    assert max(min(taken[rows]) for rows in (2, 8)) < 1.2 * min(taken[1])


#: methods whose tensors of several pictures do not fit a cache; by choice: the two that took most beyond what they take alone
BY_ROW = pytest.mark.parametrize("name", ["mustdrop-merge", "visiontrim"])


def pictures(name: str, rows: int, side: int = 12) -> tuple[TokenMethod, TokenBatch, Tensor]:
    """Pictures that a method chooses from, half of their tokens."""
    method = get_method(name)()
    one = selection.clip((1, side, side), method, "cpu", torch.float32)
    assert isinstance(method, TokenMethod)
    return method, one.select([0] * rows), torch.full((rows,), side * side // 2)


class LargestTensor(TorchDispatchMode):
    """The number of entries of the largest tensor of real numbers that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point() and not made._is_view():
            self.entries = max(self.entries, made.numel())
        return made


@BY_ROW
def test_a_batch_of_pictures_makes_no_larger_tensors_than_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "WIDTH", 64)
    entries, made = [], []
    for rows in (1, 3):
        method, tokens, count = pictures(name, rows)
        with LargestTensor() as largest:
            made.append(method.reduce(tokens, count))
        entries.append(largest.entries)
    assert entries[1] == entries[0]
    alone, together = made
    x = torch.randn(3, *tokens.valid.shape[1:], 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(together.kept, alone.kept.expand(3, -1))
    for row in range(3):
        assert torch.equal(together.substitute(x)[row], alone.substitute(x[row : row + 1])[0])


@pytest.mark.full
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="its seconds need a quiet machine; run it with -n 0")
@BY_ROW
def test_choosing_from_a_picture_takes_as_long_in_a_batch_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other pictures one after the other, so that neither finds its input in a cache."""
    monkeypatch.setattr(selection, "WIDTH", 1024)
    taken: dict[bool, list[float]] = {False: [], True: []}
    method, tokens, count = pictures(name, 8, 24)
    singles = [tokens.select([row]) for row in range(8)]
    for _ in range(9):
        for together, seconds in taken.items():
            begun = time.process_time()
            for one in [tokens] if together else singles:
                method.reduce(one, count[: len(one.valid)])
            seconds.append(time.process_time() - begun)
    assert min(taken[True]) < 1.2 * min(taken[False])
