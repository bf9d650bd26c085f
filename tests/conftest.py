"""What all tests share: one thread, how kernels run, and the option that chooses the golden vectors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SHIPPED = Path(__file__).parent / "conformance" / "golden"

# sums do not depend on the machine, and several pytest workers do not fight over the cores
torch.set_num_threads(1)

# without a GPU, kernels run in Triton's interpreter, which must be chosen before anything imports Triton
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden", type=Path, default=SHIPPED, help="folder of golden vectors (default: the few shipped ones)"
    )


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
