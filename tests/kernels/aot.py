"""Kernels compiled ahead of time, without a GPU: registers, spills and shared memory from the assembler's own report.

    from aot import SHARED_LIMIT, TARGETS, compile_for

    @pytest.mark.parametrize("target", TARGETS)
    def test_it_compiles(target):
        built = compile_for(_kernel, {"x": "*fp16", "n": "i32"}, {"BLOCK": 128}, target, num_warps=4)
        assert built.spills == 0 and built.shared <= SHARED_LIMIT[target]

Triton's interpreter and its compiler exclude each other within one process (``TRITON_INTERPRET`` decides when a kernel is
decorated), so everything is compiled in a second process, which is started once.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TARGETS = ("sm_80", "sm_90", "gfx942")

#: bytes of shared memory one block may have: CUDA C Programming Guide, table of compute capabilities; 64 KiB of LDS
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True)
class Built:
    """What became of one kernel.

    registers : per thread (vector registers on AMD).
    spills : bytes stored to and loaded from local memory; on AMD the number of spilled registers.
    shared : bytes a block.
    assembly : PTX or GCN, to look for an instruction in.
    """

    registers: int
    spills: int
    shared: int
    assembly: str


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    *,
    aligned: Collection[str] = (),
    num_warps: int = 4,
    num_stages: int = 2,
) -> Built:
    """Compile ``kernel`` for ``target``, one of :data:`TARGETS`.

    Parameters
    ----------
    kernel : a function under ``@triton.jit`` at the top of an importable module; interpreted or not.
    signature : the types of the arguments at run time, such as ``*fp16``, ``*u8``, ``i32``, ``fp32``.
    constexprs : the values of all ``tl.constexpr`` arguments.
    aligned : whole-number arguments that are multiples of 16. Pointers always are, as torch's allocations are.
    """
    source = kernel.fn
    options = {"num_warps": num_warps, "num_stages": num_stages}
    task = (source.__module__, source.__name__, dict(signature), dict(constexprs), target, tuple(aligned), options)
    return _compiler().submit(_compile, *task).result()


@cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_no_interpreter)


def _no_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(
    module: str,
    name: str,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    target: str,
    aligned: tuple[str, ...],
    options: dict[str, int],
) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(module), name)
    names = kernel.arg_names
    types = {arg: "constexpr" if arg in constexprs else signature[arg] for arg in names}
    multiples = [i for i, arg in enumerate(names) if types[arg].startswith("*") or arg in aligned]
    attrs = {(i,): [["tt.divisibility", 16]] for i in multiples}
    source = ASTSource(kernel, types, dict(constexprs), attrs)
    if target.startswith("sm_"):
        built = triton.compile(source, target=GPUTarget("cuda", int(target[3:]), 32), options=options)
        return _read_ptxas(built.asm["ptx"], built.metadata.shared)
    built = triton.compile(source, target=GPUTarget("hip", target, 64), options=options)
    return _read_code_object(built.asm["amdgcn"], built.metadata.shared)


def _read_ptxas(ptx: str, shared: int) -> Built:
    from triton.backends.nvidia.compiler import get_ptxas

    # sm_90a for sm_90: with the instructions that only Hopper has
    gpu = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        ptxas = get_ptxas(int(re.sub(r"\D", "", gpu))).path
        command = [ptxas, "-v", f"--gpu-name={gpu}", str(path), "-o", str(path.with_suffix(".cubin"))]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    return Built(_figure(r"Used (\d+) registers", report), spills, shared, ptx)


def _read_code_object(gcn: str, shared: int) -> Built:
    spills = _figure(r"\.vgpr_spill_count:\s+(\d+)", gcn) + _figure(r"\.sgpr_spill_count:\s+(\d+)", gcn)
    return Built(_figure(r"\.vgpr_count:\s+(\d+)", gcn), spills, shared, gcn)


def _figure(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise ValueError(f"the assembler's report has nothing like {pattern!r}:\n{report[-2000:]}")
    return int(found[1])
