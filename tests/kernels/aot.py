"""Kernels compiled ahead of time, without a GPU: registers, spills and shared memory from the assembler's own report.

Triton's interpreter and its compiler exclude each other within one process (``TRITON_INTERPRET`` decides when a kernel is
decorated), so this belongs into processes without it: :mod:`compilers` starts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from kernel_tasks import Task

#: bytes of shared memory one block may have: CUDA C Programming Guide, table of compute capabilities; 64 KiB of LDS
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}


class Built(NamedTuple):
    """What became of one kernel.

    registers : per thread (vector registers on AMD).
    spills : bytes stored to and loaded from memory for want of registers; on AMD bytes of memory a thread. Scalar registers
        of AMD spill to lanes of vector registers, which costs none.
    shared : bytes a block.
    assembly : PTX or GCN, to look for an instruction in.
    binary : the machine code for NVIDIA, to disassemble.
    """

    registers: int
    spills: int
    shared: int
    assembly: str
    binary: bytes = b""


def build(task: Task, target: str) -> Built:
    """Compile for a target of :data:`kernel_tasks.TARGETS` with the Triton of this process, which must not have cached it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(task.module), task.kernel)
    types, fixed = dict(task.types), dict(task.fixed)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in task.aligned}
    source, options = ASTSource(kernel, signature, fixed, attributes), dict(task.options)
    if target.startswith("gfx"):
        with _without_rocm():
            built = triton.compile(source, target=GPUTarget("hip", target, 64), options=options)
        code = built.asm["amdgcn"]
        if spilled := _figure(r"\.vgpr_spill_count:\s+(\d+)", code):
            assert _figure(r"\.private_segment_fixed_size:\s+(\d+)", code), f"{spilled} registers are nowhere"
        memory = _figure(r"\.private_segment_fixed_size:\s+(\d+)", code)
        return Built(_figure(r"\.vgpr_count:\s+(\d+)", code), memory, built.metadata.shared, code)
    with _Reports() as reports:
        built = triton.compile(source, target=GPUTarget("cuda", int(target[3:]), 32), options=options)
    said = reports.found[-1]
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))
    return Built(
        _figure(r"Used (\d+) registers", said), spills, built.metadata.shared, built.asm["ptx"], built.asm["cubin"]
    )


@contextmanager
def _without_rocm() -> Iterator[None]:
    """Triton 3.4 links what it assembled with the linker of a ROCm installation, which a machine without such a GPU lacks; here
    assembling is the end."""
    from triton.backends.amd import compiler

    backend = compiler.HIPBackend
    if not hasattr(backend, "path_to_rocm_lld"):
        yield
        return

    def assemble(code: str, metadata: Any, options: Any) -> Any:
        return compiler.amd.assemble_amdgcn(code, options.arch, "")

    with (
        patch.object(backend, "hash", lambda self: f"assembled for {self.target}"),
        patch.object(backend, "make_hsaco", staticmethod(assemble)),
    ):
        yield


class _Reports:
    """What ptxas says of everything that Triton assembles inside; Triton asks it to, and throws it away."""

    def __init__(self) -> None:
        from triton.backends.nvidia import compiler

        self.found: list[str] = []
        self._run, self._patch = compiler.subprocess.run, patch.object(compiler.subprocess, "run", self._listen)

    def _listen(self, *command: Any, stderr: Any = None, **options: Any) -> Any:
        done = self._run(*command, stderr=stderr, **options)
        if hasattr(stderr, "name"):
            self.found.append(Path(stderr.name).read_text(encoding="utf-8"))
        return done

    def __enter__(self) -> _Reports:
        self._patch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)


def _figure(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise ValueError(f"the assembler's report has nothing like {pattern!r}:\n{report[-2000:]}")
    return int(found[1])
