"""CUDA C++ compiled at first use, by the compiler that comes with torch (NVRTC), and launched through the driver.

Neither needs a toolkit or a C compiler on the machine, and compiling needs no GPU. Where a library is missing or something is
refused, :class:`.launch.Unbuildable` says so, and the caller has another way.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .launch import Unbuildable

#: of cuFuncSetAttribute: bytes of shared memory beyond those that every kernel may have, and how much of the memory that a
#: multiprocessor shares out is no cache, in percent
_MOST_SHARED, _NO_CACHE = 8, 9

#: CUDA_ERROR_INVALID_CONTEXT
_NO_CONTEXT = 201


class Kernel(NamedTuple):
    """A kernel on a device. resident : blocks that a multiprocessor runs at once. launch : see :func:`function`."""

    resident: int
    launch: Callable[[tuple[int, int], ctypes.Structure], None]


@lru_cache(maxsize=256)
def compiled(source: Path, macros: tuple[tuple[str, int], ...], target: str) -> tuple[bytes, str]:
    """Machine code of ``source`` for ``target``, such as ``sm_90``, and what the assembler says of it.

    Raises
    ------
    Unbuildable
        If there is no compiler, or it refuses the program.
    """
    nvrtc = _compiler()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = source.read_text(encoding="utf-8").encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None):
        raise Unbuildable("NVRTC takes no program")
    try:
        options = [f"-arch={target}", "-std=c++17", "-default-device", "--ptxas-options=-v"]
        given = [option.encode() for option in options + [f"-D{name}={value}" for name, value in macros]]
        failed = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        said = _text(nvrtc, "ProgramLog", program, size).rstrip(b"\0").decode(errors="replace")
        if failed:
            raise Unbuildable(f"NVRTC refuses {source.name} for {target}: {said[:1000]}")
        return _text(nvrtc, "CUBIN", program, size), said
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def spills(said: str) -> int:
    """Bytes that a thread stores to memory and loads again for want of registers, by what the assembler says."""
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))


def version() -> tuple[int, int]:
    """Version of the compiler."""
    return _version(_compiler())


def _version(nvrtc: Any) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p, size: ctypes.c_size_t) -> bytes:
    if getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
        raise Unbuildable(f"NVRTC has no {what}")
    buffer = ctypes.create_string_buffer(size.value)
    if getattr(nvrtc, f"nvrtcGet{what}")(program, buffer):
        raise Unbuildable(f"NVRTC gives no {what}")
    return buffer.raw


@lru_cache(maxsize=256)
def function(
    source: Path, macros: tuple[tuple[str, int], ...], name: str, threads: int, shared: int, device: torch.device
) -> Kernel:
    """The kernel ``name`` of ``source`` on ``device``, the current one: called with a grid and its one argument it is launched
    on the current stream.

    Parameters
    ----------
    threads : of a block. shared : bytes of dynamic shared memory.

    Raises
    ------
    Unbuildable
        If it cannot be compiled or loaded.
    """
    code, _ = compiled(source, macros, target_of(device))
    driver, module, kernel, resident = _driver(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _enter(driver, device)
    _asked(driver.cuModuleLoadData(ctypes.byref(module), code), "load a module")
    _asked(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()), f"find {name}")
    _asked(driver.cuFuncSetAttribute(kernel, _MOST_SHARED, shared), f"give {name} {shared} bytes of shared memory")
    _asked(driver.cuFuncSetAttribute(kernel, _NO_CACHE, 100), f"share out its memory for {name}")
    count = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    _asked(
        count(ctypes.byref(resident), kernel, threads, ctypes.c_size_t(shared)),
        f"say how many blocks of {name} it runs",
    )
    if resident.value < 1:
        raise Unbuildable(f"no block of {name} fits a multiprocessor")

    def launch(grid: tuple[int, int], argument: ctypes.Structure) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        given = (kernel, *grid, 1, threads, 1, 1, shared, stream, pointers, None)
        failed = driver.cuLaunchKernel(*given)
        if failed == _NO_CONTEXT:
            _enter(driver, device)
            failed = driver.cuLaunchKernel(*given)
        if failed:
            raise RuntimeError(f"CUDA error {failed} at the launch of {name}.")

    return Kernel(resident.value, launch)


def target_of(device: torch.device) -> str:
    """Architecture to compile for on a device."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _enter(driver: Any, device: torch.device) -> None:
    """Make the context that torch uses the current one of this thread, which may have done nothing on the device yet."""
    context = ctypes.c_void_p()
    _asked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0), "give its context")
    _asked(driver.cuCtxSetCurrent(context), "enter its context")


def _asked(failed: int, what: str) -> None:
    if failed:
        raise Unbuildable(f"the driver does not {what} (error {failed})")


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unbuildable(str(error)) from error


@cache
def _compiler() -> Any:
    """NVRTC as torch has loaded it, or as the wheels beside torch have it."""
    if torch.version.cuda is None:
        raise Unbuildable("this torch was built without CUDA")
    major, minor = torch.version.cuda.split(".")[:2]
    name = f"libnvrtc.so.{major}" if int(major) > 11 else f"libnvrtc.so.11.{min(int(minor), 2)}"
    beside = [Path(torch.__file__).parents[1] / "nvidia" / folder / "lib" for folder in (f"cu{major}", "cuda_nvrtc")]
    nvrtc = _opened(name, *(folder / name for folder in beside))
    if nvrtc is None:
        raise Unbuildable(f"{name} is not there; it comes with torch")
    # that of CUDA 13.0 does not look beside itself for the headers it comes with, and takes them where they are loaded
    headers = f"libnvrtc-builtins.so.{'.'.join(map(str, _version(nvrtc)))}"
    _opened(*(folder / headers for folder in beside))
    return nvrtc


def _opened(*paths: str | Path) -> ctypes.CDLL | None:
    """The first library that is there."""
    for path in paths:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


__all__ = ["Kernel", "compiled", "function", "spills", "target_of", "version"]
