"""What all tests share: one thread, how kernels run, how many processes, and the option that chooses the golden vectors."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import APART, in_part, part

SHIPPED = Path(__file__).parent / "conformance" / "golden"

# imports make no garbage, and looking for some takes a fifth of their time; on again before the first test
gc.disable()

# sums do not depend on the machine, and several pytest workers do not fight over the cores
torch.set_num_threads(1)
# nor do the programs that tests start
os.environ.setdefault("OMP_NUM_THREADS", "1")
# no test needs the hub, and without a network every question to it is repeated for a minute
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# without a GPU, kernels run in Triton's interpreter, which must be chosen before anything imports Triton
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden", type=Path, default=SHIPPED, help="folder of golden vectors (default: the few shipped ones)"
    )
    parser.addoption(
        "--second-runner", action="store_true", help="tests of the plug-in for vLLM use its model runner V2"
    )
    parser.addoption(
        "--part", type=part, default=(1, 1), metavar="K/N", help="the Kth of N parts of the tests: 1/2, or 2/2"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "square(names, cases): like parametrize, of which so many run as show every pair"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of a square of cases run those that show every pair (see `pairwise.py`)."""
    if marks := list(metafunc.definition.iter_markers("square")):
        import pairwise

        pairwise.parametrize(metafunc, marks)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for every core, four at most; one for a few tests, the demo, a cluster or vLLM."""
    few = config.option.keyword or any("::" in argument for argument in config.args)
    return 0 if few or config.option.markexpr in ("browser", "ray", "vllm") else min(4, os.cpu_count() or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test belongs to one run, of which a part may be asked for."""
    for item in items:
        marks = [name for name in APART if item.get_closest_marker(name)]
        if len(marks) > 1:
            raise pytest.UsageError(f"{item.nodeid} belongs to one run, not to {' and '.join(marks)}")
    k, n = config.option.part
    here = [in_part(item.nodeid, k, n) for item in items]
    config.hook.pytest_deselected(items=[item for item, stays in zip(items, here, strict=True) if not stays])
    items[:] = [item for item, stays in zip(items, here, strict=True) if stays]


def pytest_collection_finish() -> None:
    """What was imported stays: whoever collects garbage need not look at it."""
    hide_methods_of_tests()
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module")
def cheap_collections() -> None:
    """For files whose tests collect garbage again and again: objects that earlier tests left are not looked at each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


#: the methods that files of tests register, by the file's module
of_tests: dict[str, dict[str, Any]] = {}


def hide_methods_of_tests() -> None:
    """What files of tests register when they are collected is not there for what serves all of them, as the demo does."""
    registry = sys.modules.get("mmaccel.method.registry")
    for name, kind in list(registry._methods.items()) if registry else ():
        if kind.__module__.rpartition(".")[2].startswith("test_"):
            of_tests.setdefault(kind.__module__, {})[name] = registry._methods.pop(name)


@pytest.fixture(scope="module", autouse=True)
def methods_of_the_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """A method that a file of tests registers is known in that file only, whatever else was collected."""
    from mmaccel.method import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_methods", registry.methods() | of_tests.get(request.module.__name__, {}))
        yield


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test registers is gone afterwards."""
    import mmaccel
    from mmaccel.method import registry

    mmaccel.methods()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
