"""Kernels run on the GPU where there is one, else in Triton's interpreter (chosen in the conftest of all tests)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

#: one test of every kernel, for the default run; the others that launch kernels are marked ``kernel``
QUICK = {
    "test_append.py::test_the_kernel[one token of a group-torch.float16-torch.int32]",
    "test_best.py::test_the_kernel_of_best_units[(2, 1, 5000, True, True)]",
    "test_chosen.py::test_the_kernel_reads_what_is_chosen[pages-masked]",
    "test_compact.py::test_the_kernel[torch.float16-(2, 2, 20, 256, 64)]",
    "test_copies.py::test_picks_are_the_first_of_each_kind[8-4096]",
    "test_decode.py::test_the_kernel_agrees_with_the_definition[ragged-masked]",
    "test_decode.py::test_pages_alone_are_read_as_the_definition_says[kivi 2-dtype0]",
    "test_decode.py::test_pages_before_flat_keys_before_the_tail[kivi-1-False]",
    "test_importance.py::test_the_kernel[torch.bfloat16-(2, 4, 2, 5, 70, 20)]",
    "test_loki.py::test_the_kernel_of_low_rank_logits[max-dtype1-(2, 6, 2, 300, 64, 16)]",
    "test_matching.py::test_the_kernel[(3, 5, 130, 64)-True-torch.float32]",
    "test_maxmin.py::test_the_kernel_of_greedy_dpp[(3, 33, 130)]",
    "test_maxmin.py::test_the_kernel_of_max_min[none-0-(3, 33, 130)]",
    "test_paged_cuda.py::test_pages_are_read_as_the_definition_says[kivi 4-dtype1]",
    "test_quest.py::test_the_kernel_of_page_bounds[max-dtype1-(2, 6, 2, 70, 64)]",
    "test_pack.py::test_kernel_is_its_definition[int2-channel-(32, 16, 32)]",
    "test_votes.py::test_the_kernel_of_keep_alike[dtype1-3-28-128-40]",
    "test_votes.py::test_the_kernel_of_votes[(2, 6, 2, 300, 250, 64, True)-dtype1-True]",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks where kernels run, or counts what they read, launches them."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        launches = {"device", "meter"} & set(getattr(item, "fixturenames", ()))
        if launches and f"{item.path.name}::{item.name}" not in QUICK:
            item.add_marker("kernel")
    whole = {item.path.name for item in here}
    gone = {name for name in QUICK if name.split("::")[0] in whole} - {f"{i.path.name}::{i.name}" for i in here}
    if gone and not any("::" in argument for argument in here[0].config.args):
        raise pytest.UsageError(f"no such tests of kernels: {', '.join(sorted(gone))}; name others in QUICK")


@pytest.fixture(scope="session")
def device() -> str:
    """Where a kernel and its definition are compared; without Triton there is nothing to compare."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def guard(device: str, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made the current one while kernels ran; also where there is none."""
    entered: list[torch.device] = []
    real: type = torch.cuda.device if device == "cuda" else contextlib.nullcontext

    class Entered(real):  # torch asks whether what it is given is one
        def __init__(self, device: torch.device) -> None:
            entered.append(device)
            super().__init__(device)

    monkeypatch.setattr(torch.cuda, "device", Entered)
    return entered


@pytest.fixture(scope="session", autouse=True)
def products_of_bfloat16() -> Iterator[None]:
    """Triton's interpreter keeps bfloat16 as the bits of whole numbers, and multiplies matrices of those."""
    if torch.cuda.is_available():
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl, builder = pytest.importorskip("triton.language"), interpreter.interpreter_builder
    dot = builder.create_dot

    def widened(a, b, *rest):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (builder.create_fp_ext(x, tl.float32) for x in (a, b))
        return dot(a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", widened)
        yield
