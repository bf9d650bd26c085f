"""The CUDA C++ of packed attention on the CPU: compiled by g++ with ``warps.cpp``, and put where the GPU's would be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mmaccel_kernels.decode import cuda
from mmaccel_kernels.pages import Pages
from torch import Tensor

HERE = Path(__file__).parent


def loop(pages: Pages, query: Tensor, masked: bool) -> cuda.Loop | None:
    """What :func:`cuda.loop` gives on a GPU."""
    made = cuda.macros(pages, query, masked)
    if made is None:
        return None
    library = _library(tuple(made.items()))
    assert library.shared_bytes() == cuda.shared(made)

    def start(grid: tuple[int, int], given: cuda.Arguments) -> None:
        library.run(ctypes.byref(given), *grid)

    return cuda.Loop(made["PAGE"] // made["UNIT"], 2, start)


@cache
def _library(macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    path = _folder() / f"{len(list(_folder().iterdir()))}.so"
    options = [f"-D{name}={value}" for name, value in macros]
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f'-DSOURCE="{cuda.SOURCE}"', *options]
    subprocess.run([*command, str(HERE / "warps.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


@cache
def _folder() -> Path:
    import atexit

    path = Path(mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
