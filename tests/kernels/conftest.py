"""Kernels run on the GPU where there is one, else in Triton's interpreter (chosen in the conftest of all tests)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where a kernel and its definition are compared; without Triton there is nothing to compare."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def guard(device: str, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made the current one while kernels ran; also where there is none."""
    entered: list[torch.device] = []
    real = torch.cuda.device if device == "cuda" else contextlib.nullcontext
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or real(device))
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
