"""The installed compiler takes the kernels; `compilers.py` asks all of them, for every configuration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compilers
import instructions
import pytest
from kernel_tasks import TARGETS, cases

HERE = Path(__file__).parent

#: quick ones that launch every kernel but those of packed pages
SOME = ["compact, merged", "max_min of 4096", "greedy_dpp of 1024", "importance bf16, 128 channels"]


@pytest.mark.kernel
def test_every_configuration_compiles_and_spills_what_the_table_says(capsys: Any) -> None:
    assert compilers.main(["--triton", "installed"]) == 0, capsys.readouterr().out


@pytest.mark.kernel
def test_some_compile_and_spill_what_the_table_says(capsys: Any) -> None:
    assert compilers.main(["--triton", "installed", "--jobs", "1", "--only", *SOME]) == 0, capsys.readouterr().out
    # three targets, and importance is three kernels
    assert "18 compiled" in capsys.readouterr().out


@pytest.mark.kernel
def test_decode_steps_copy_ahead_and_multiply_in_tensor_cores() -> None:
    program = """
import json
from aot import build
from kernel_tasks import tasks
case = "decode bf16, 128 channels, 1 x 7 queries"
found = {target: build(tasks(target, [case])[f"{case}: _decode"], target) for target in ("sm_80", "sm_90")}
print(json.dumps({t: [b.spills, "cp.async" in b.assembly, "mma.sync" in b.assembly] for t, b in found.items()}))
"""
    path = os.pathsep.join([str(HERE), str(compilers.ROOT), str(compilers.ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_ALWAYS_COMPILE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"sm_80": [0, True, True], "sm_90": [0, True, True]}


def test_every_codec_is_compiled() -> None:
    from mmaccel.kv.codecs import Codec
    from mmaccel.method.registry import methods

    codecs = {name for name, method in methods().items() if issubclass(method, Codec)}
    assert codecs <= {name.split(",")[0].split(" ")[0] for name in cases()}


def found(spills: int, only: list[str] | None = None) -> dict[str, Any]:
    by_target = {target: {} for target in TARGETS} | {"sm_90": {"a": spills} if spills else {}}
    return {"triton": "3.6", "names": ["a", "b"], "only": only, "spills": by_target, "failed": []}


@pytest.mark.parametrize(
    ("now", "table", "says"),
    [
        (40, {"sm_90": {"a": 40}}, None),
        (0, {}, None),
        (48, {"sm_90": {"a": 40}}, "sm_90, a: spills 48 bytes, where the table has 40"),
        (40, {}, "sm_90, a: spills 40 bytes, where the table has 0"),
        (40, {"sm_80": {"a": 40}, "sm_90": {"a": 40}}, "sm_80, a: spills 0 bytes; the table is stale with 40"),
        (32, {"sm_90": {"a": 40}}, "sm_90, a: spills 32 bytes; the table is stale with 40"),
        (40, {"sm_90": {"a": 40, "gone": 8}}, "gone is in the table, and nothing is launched so"),
    ],
)
def test_a_spill_that_grows_is_new_or_is_gone_is_told(now: int, table: compilers.Spills, says: str | None) -> None:
    said = compilers.differences(found(now), {"3.6": table})
    assert len(said) == (says is not None) and all(says in line for line in said)


def test_a_triton_without_a_table_is_told() -> None:
    (said,) = compilers.differences(found(0), {"3.4": {}})
    assert said.startswith("spills.json has no Triton 3.6")


def test_an_update_of_some_leaves_the_others() -> None:
    table = {"3.6": {"sm_90": {"a": 8, "c": 16}, "sm_80": {"c": 24}}}
    assert compilers.updated(found(40, ["a"]), table) == {
        "sm_80": {"c": 24},
        "sm_90": {"a": 40, "c": 16},
        "gfx942": {},
    }
    assert compilers.updated(found(40), table) == {"sm_80": {}, "sm_90": {"a": 40}, "gfx942": {}}


def test_what_cannot_be_compiled_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import aot

    outer = RuntimeError("at 3:4: the line of the caller")
    outer.__cause__ = TypeError("int plus float")
    monkeypatch.setattr(aot, "build", lambda task, target: (_ for _ in ()).throw(outer))
    assert compilers._build(None, "sm_90") == (0, "cannot be compiled: int plus float")
    built = aot.Built(0, 0, 70 * 1024, "")
    monkeypatch.setattr(aot, "build", lambda task, target: built)
    assert compilers._build(None, "sm_90") == (0, "")
    assert "of shared memory, more than the 65536" in compilers._build(None, "gfx942")[1]


@pytest.mark.kernel
def test_page_loops_cost_what_the_table_says(capsys: Any) -> None:
    assert instructions.main(["--triton", "installed"]) == 0, capsys.readouterr().out


#: instructions a byte at most, by the bits of keys and values
MOST = {"kivi, 4 bit": 0.1, "think": 0.1, "calibquant, 4 bit": 0.1, "kivi, 8 bit": 0.1, "fp8": 0.1, "kivi, 2 bit": 0.15}
MOST |= {"kivi, half precision": 0.15, "calibquant": 0.25, "vidkv": 0.25, "vidkv, protected tokens": 0.25}
MOST |= {"kivi, all at once": 0.15}
MOST |= {"turboquant, 4 bit": 0.19, "turboquant, 3 bit": 0.25, "turboquant, 2 bit": 0.28}

#: registers a thread at most, by NVRTC 13.2; 13.0 takes up to 150 for the same loops, which fit a multiprocessor twice or more
REGISTERS = {"kivi, 4 bit": 130, "kivi, 2 bit": 128, "kivi, half precision": 128, "calibquant": 128, "fp8": 128}


@pytest.mark.kernel
def test_loops_in_cuda_cost_what_the_table_says_and_no_more_than_memory_allows(capsys: Any) -> None:
    assert instructions.main(["--triton", instructions.NVRTC]) == 0, capsys.readouterr().out
    version = capsys.readouterr().out.splitlines()[0]
    table = json.loads(instructions.TABLE.read_text(encoding="utf-8"))[version]
    for target in instructions.TARGETS:
        for case, most in MOST.items():
            found = next(of for name, of in table[target].items() if re.match(rf"{case} (bf|fp)16", name))
            assert found["instructions"] <= most and found["spills"] == 0 and found["blocks"] >= 2, (target, case)
            assert found["wide"] >= 0.85 and found["barriers"] == 0, (target, case)
            if version != "NVRTC 13.0":
                assert found["registers"] <= REGISTERS.get(case, 255), (target, case)


LOOPS = """
.L_x_1:
        /*0000*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0020*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_3:
        /*0030*/              @!P0 LDGSTS.E.BYPASS.128 [R16], desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.U8 R3, desc[UR4][R2.64] ;
        /*0050*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*0080*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*0090*/              @!P0 BRA `(.L_x_3) ;
        /*00a0*/              @!P1 BRA `(.L_x_2) ;
        /*00b0*/                   NOP ;
"""


def test_the_page_loop_is_found_and_counted() -> None:
    import aot

    built = aot.Built(129, 0, 60 * 1024, "")
    # 136 registers a thread are given, 4 warps of which fit three times; 61 KiB of shared memory fit twice and thrice
    assert instructions.figures(LOOPS, "sm_80", 4, 100, built) == (129, 0, 2, 0.28, 0.97, 0.48, 1)
    assert instructions.figures(LOOPS, "sm_90", 4, 100, built).blocks == 3


def test_figures_that_differ_are_told() -> None:
    now = {"sm_90": {"a": {"registers": 128, "instructions": 0.2}}}
    assert instructions.differences("Triton 3.6", now, {"Triton 3.6": now}, True) == []
    (worse,) = instructions.differences(
        "Triton 3.6", now, {"Triton 3.6": {"sm_90": {"a": {"registers": 128, "instructions": 0.1}}}}, True
    )
    assert worse == "sm_90, a: instructions is 0.2, where the table has 0.1."
    (gone,) = instructions.differences("Triton 3.6", {"sm_90": {}}, {"Triton 3.6": now}, True)
    assert gone.startswith("sm_90, a is in the table")
    (none,) = instructions.differences("Triton 3.9", now, {"Triton 3.6": now}, True)
    assert none.startswith("instructions.json has no Triton 3.9")
