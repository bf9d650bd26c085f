"""The one place that chooses between a kernel and its definition, and the one from which kernels are launched.

A device is asked once whether a kernel builds and runs there: Triton compiles with a C compiler at first use, which images made
for running programs often lack. Where it does not, and where the compiler refuses one kernel, the plain definition runs, after
one warning that says why and what helps.
"""

from __future__ import annotations

import subprocess
import threading
import warnings
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ._triton import jit, tl, triton

T = TypeVar("T")

#: whether the work at hand may run kernels at all; whoever opens a call sets it for the length of that call
allowed: ContextVar[bool] = ContextVar("mmaccel_kernels_allowed", default=True)


class Obstacle(NamedTuple):
    """Reason why no kernel runs, and a remedy, half a sentence each."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class Unbuildable(RuntimeError):
    """This kernel cannot be compiled for this device; its definition can do the work."""


#: what errors of a build say -> what helps
_REMEDIES = {
    "C compiler": "install one, such as gcc, or name it in the environment variable CC",
    "non-zero exit status": "see what the C compiler says above; it needs the headers of Python (package python3-dev)",
    "libcuda": "make the driver's libcuda.so known to the linker (ldconfig)",
    "Permission denied": "set TRITON_CACHE_DIR to a folder that can be written",
    "Read-only": "set TRITON_CACHE_DIR to a folder that can be written",
    "No space left": "make room, or set TRITON_CACHE_DIR to a folder that has some",
}
_REMEDY = "install the Triton that your torch was built for; results are right without it, and slower"

#: kernels that did not compile, as they were called -> why
_failed: dict[tuple[Any, ...], Obstacle] = {}
#: kernels that need more shared memory than the device has, as they were called -> the stages that fit
_fewer: dict[tuple[Any, ...], int] = {}


# --- which one --------------------------------------------------------------------------------------------------------
def works(device: torch.device) -> bool:
    """Whether operations on ``device`` run their kernels now: they build there, and the call at hand does not refuse them."""
    return allowed.get() and usable(device)


@cache
def usable(device: torch.device) -> bool:
    """Whether kernels build on ``device``, a GPU (CUDA or HIP); where they should and do not, a warning says why."""
    if device.type != "cuda":
        return False
    found = obstacle(device)
    if found is not None:
        warnings.warn(f"No GPU kernels on {device}, plain torch is used: {found}.", RuntimeWarning, stacklevel=2)
    return found is None


@cache
def obstacle(device: torch.device) -> Obstacle | None:
    """Reason why kernels cannot run on ``device``, found by building and running the smallest one; None if they can."""
    if device.type != "cuda":
        return Obstacle("kernels run on GPUs only", "the definitions in plain torch serve every other device")
    if triton is None:
        return Obstacle(
            "Triton is not installed", "run pip install triton, in the version that your torch was built for"
        )
    try:
        with torch.cuda.device(device):
            x = torch.zeros(16, dtype=torch.int32, device=device)
            _count[(1,)](x, 16)
            right = x.tolist() == list(range(16))
    except Exception as error:  # compilers, linkers, drivers and file systems raise all kinds
        return _explained(error)
    return None if right else Obstacle("a kernel that only counts gives wrong numbers", "update the driver and Triton")


# --- running ----------------------------------------------------------------------------------------------------------
def run(kernel: Callable[..., T], definition: Callable[..., T], x: Tensor, *rest: Any) -> T:
    """``kernel(x, *rest)`` with the device of ``x`` as the current one where kernels work, else ``definition(x, *rest)``."""
    device = x.device
    if (device.type == "cpu" and torch.compiler.is_compiling()) or not works(device):
        return definition(x, *rest)
    with torch.cuda.device(device):
        return attempt(kernel, definition, x, *rest)


def attempt(kernel: Callable[..., T], definition: Callable[..., T], *args: Any) -> T:
    """The kernel on the current device, and the definition if it cannot be compiled."""
    try:
        return kernel(*args)
    except Unbuildable:
        return definition(*args)


def enqueue(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch ``kernel``, a function under ``triton.jit``, on ``grid`` and the current device; returns what was compiled.

    Parameters
    ----------
    *args : of the kernel, tensors among them. **options : its ``tl.constexpr`` arguments, ``num_warps`` and ``num_stages``.

    Raises
    ------
    Unbuildable
        If it cannot be compiled for this device; the first time after a warning, later at once.

    Versions of Triton differ in the shared memory that a stage takes: where so many do not fit, fewer are compiled, once.
    """
    if _failed and (known := _failed.get(_configuration(kernel, args, options))):
        raise Unbuildable(str(known))
    asked = options
    if _fewer and (stages := _fewer.get(_configuration(kernel, args, asked))):
        options = _with_stages(asked, stages)
    try:
        return kernel[grid](*args, **options)
    except Exception as error:
        if not _of_the_build(error):
            raise
        if isinstance(error, triton.OutOfResources) and options.get("num_stages", 1) > 1:
            _fewer[_configuration(kernel, args, asked)] = options["num_stages"] - 1
            return enqueue(kernel, grid, *args, **asked)
        options = asked
        found, device, name = _explained(error), _device_of(args), kernel.fn.__name__
        if not any(key[:2] == (kernel, device) for key in _failed):
            text = f"The kernel {name} cannot be compiled for {device}, plain torch is used: {found}."
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        _failed[_configuration(kernel, args, options)] = found
        raise Unbuildable(f"{name}: {found}") from error


class Repeated:
    """A kernel that is launched at every step: what Triton asks of every argument at every launch is asked once.

    It serves calls that differ in pointers and in numbers that nothing is compiled for; those of one object are of the same
    device, types and ``options`` (see :func:`enqueue`). What else Triton compiles for is whether pointers and numbers are
    multiples of 16. The caller says whether all are (``even``); others go the long way.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options
        self._made: Any = None
        self._fixed: tuple[Any, ...] = ()

    def launch(self, grid: tuple[int, int, int], even: bool, *args: Any) -> None:
        """As :func:`enqueue`; ``args`` are all that come before the ``tl.constexpr`` ones."""
        if even and self._made is not None:
            self._made[grid](*args, *self._fixed)
            return
        made = enqueue(self.kernel, grid, *args, **self.options)
        # AMD's compiler looks at sizes, too; interpreters and tests compile nothing
        if even and torch.version.hip is None and hasattr(made, "asm"):
            self._fixed = tuple(self.options[name] for name in self.kernel.arg_names[len(args) :])
            self._made = made


def is_even(numbers: tuple[int, ...], tensors: list[Tensor]) -> bool:
    """Whether addresses of tensors are multiples of 16, and ``numbers`` too, none of which takes more than 31 bits."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    for number in numbers:
        bits |= number
    return not bits & 15 and max(numbers, default=0) < 1 << 31


class _Kept(threading.local):
    """A buffer of this thread by use, device and stream, and its parts: nobody else writes to them between two launches."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, torch.device, int], tuple[Tensor, tuple[int, ...], list[Tensor]]] = {}


_kept = _Kept()


def workspace(like: Tensor, *sizes: int, use: str = "") -> list[Tensor]:
    """Float32 numbers on the device of ``like``, not initialised, for what a launch leaves to later ones; so many in each part.
    What launches of another ``use`` have left stays.

    The same at every step on one stream of one thread. A CUDA graph that is being captured gets its own.
    """
    device, stream, capturing = like.device, 0, False
    if device.type == "cuda":
        stream, capturing = torch.cuda.current_stream(device).cuda_stream, torch.cuda.is_current_stream_capturing()
    buffer, known, parts = (None, (), []) if capturing else _kept.parts.get((use, device, stream), (None, (), []))
    if known == sizes:
        return parts
    # parts begin at multiples of 16 bytes
    even = [-(-size // 4) * 4 for size in sizes]
    if buffer is None or len(buffer) < sum(even):
        buffer = torch.empty(sum(even), dtype=torch.float32, device=device)
    parts = list(buffer[: sum(even)].split(even))
    if not capturing:
        _kept.parts[use, device, stream] = (buffer, sizes, parts)
    return parts


def failure(operation: Callable[..., Any], device: torch.device) -> Obstacle | None:
    """Reason why a kernel of the folder of ``operation`` did not compile for ``device``; None if all that was launched did."""
    failed = (
        why
        for (kernel, where, *_), why in _failed.items()
        if kernel.fn.__module__.rpartition(".")[0] == operation.__module__ and where == device
    )
    return next(failed, None)


def _configuration(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Hashable, ...]:
    """What a kernel is compiled for, as far as a failure may depend on it."""
    types = tuple(arg.dtype for arg in args if isinstance(arg, Tensor))
    return kernel, _device_of(args), types, tuple(options.items())


def _device_of(args: tuple[Any, ...]) -> torch.device:
    """Of the tensors among the arguments; others may be None."""
    return next(arg.device for arg in args if isinstance(arg, Tensor))


def _with_stages(options: dict[str, Any], stages: int) -> dict[str, Any]:
    """Options with so many stages, for the launch and for loops of the kernel that are told."""
    return options | {name: stages for name in ("num_stages", "STAGES") if name in options}


def _of_the_build(error: Exception) -> bool:
    """Whether a compiler or linker failed, and not the launch or something before it on the device."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, (triton.errors.TritonError, subprocess.SubprocessError, OSError, ImportError)):
        return not isinstance(error, triton.runtime.errors.InterpreterError)
    text = str(error)
    return isinstance(error, RuntimeError) and not (
        "Triton Error" in text or "CUDA error" in text or "HIP error" in text
    )


def _explained(error: Exception) -> Obstacle:
    while isinstance(error.__cause__, Exception):
        # Triton names the line of every caller, and the reason last
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[-1] if isinstance(error, triton.errors.TritonError) else lines[0]
    if isinstance(error, subprocess.CalledProcessError):
        text = f"{error.cmd[0]} failed with exit status {error.returncode}"
    remedy = next((remedy for said, remedy in _REMEDIES.items() if said in str(error)), _REMEDY)
    return Obstacle(text.rstrip(".")[:300], remedy)


@jit
def _count(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, i + tl.load(x + i))


__all__ = [
    "Obstacle",
    "Repeated",
    "Unbuildable",
    "allowed",
    "attempt",
    "enqueue",
    "failure",
    "is_even",
    "obstacle",
    "run",
    "usable",
    "workspace",
    "works",
]
