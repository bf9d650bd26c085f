"""The compiler of CUDA C++ that comes with torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmaccel_kernels import nvrtc
from mmaccel_kernels.decode import cuda


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Libraries that were opened, on a machine that has only those beside torch, of CUDA 13.0."""
    paths: list[str] = []

    def version(major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = 13, 0

    def cdll(path: str) -> Any:
        if "/cu13/lib/" not in path:
            raise OSError(path)
        paths.append(Path(path).name)
        return SimpleNamespace(nvrtcVersion=version)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", cdll)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvrtc._compiler.cache_clear()
    yield paths
    nvrtc._compiler.cache_clear()


def test_the_compiler_beside_torch_is_given_what_it_does_not_look_for_itself(opened: list[str]) -> None:
    assert nvrtc.version() == (13, 0)
    assert opened == ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0"]


def test_spilled_bytes_are_summed() -> None:
    said = "f\n 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nUsed 128 registers"
    assert nvrtc.spills(said) == 16


@pytest.mark.parametrize(("least", "blocks"), [(4, 4), (3, 3), (2, 2), (1, 2)])
def test_as_many_blocks_as_spill_nothing(least: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than ``least`` blocks to a multiprocessor the compiler spills."""

    def compiled(source: Path, macros: tuple[tuple[str, int], ...], target: str) -> tuple[bytes, str]:
        spilled = 4 * (dict(macros)["BLOCKS"] > least)
        return b"", f"{spilled} bytes spill stores, {spilled} bytes spill loads"

    monkeypatch.setattr(nvrtc, "compiled", compiled)
    assert cuda.built({"BITS": 4}, "sm_90") == {"BITS": 4, "BLOCKS": blocks}


def test_a_kernel_is_launched_with_as_many_blocks_as_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Driver:
        def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, count: Any, *given: Any) -> int:
            count._obj.value = 3
            asked.append(("occupancy", given[1], given[2].value))
            return 0

        def cuFuncSetAttribute(self, kernel: Any, which: int, value: int) -> int:
            asked.append((which, value))
            return 0

        def cuLaunchKernel(self, kernel: Any, *given: Any) -> int:
            asked.append(("launch", *given[:7]))
            return 0

        def __getattr__(self, name: str) -> Any:
            return lambda *given: 0

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    monkeypatch.setattr(nvrtc, "compiled", lambda *given: (b"", ""))
    monkeypatch.setattr(nvrtc, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    nvrtc.function.cache_clear()
    found = nvrtc.function(cuda.SOURCE, (("BITS", 4),), "attend", 128, 62000, torch.device("cuda:0"))
    nvrtc.function.cache_clear()
    found.launch((264, 1), cuda.Arguments())
    assert found.resident == 3
    assert asked == [(8, 62000), (9, 100), ("occupancy", 128, 62000), ("launch", 264, 1, 1, 128, 1, 1, 62000)]
