"""What the loops over packed pages cost, counted in machine code for sm_80 and sm_90; no GPU is needed.

A loop is bound by memory where its warp instructions a byte are fewer than a multiprocessor issues while that byte arrives: at
most about .1 at full rate. Every codec's kernel is compiled as it is launched, disassembled with the nvdisasm that comes with
Triton, and its page loop (the innermost one with most matrix instructions) counted. What is found must be what the table beside
this file says; --update writes it down anew, here and in docs/decoding.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import compilers
from kernel_tasks import loops, pages_of, tasks

from mmaccel.cli.shared.text import put_between

TABLE = compilers.HERE / "instructions.json"
PAGE = compilers.ROOT / "docs" / "decoding.md"
#: that of the machine the benchmarks were made for, and the one that is installed
VERSIONS = ("3.6", "installed")
#: in the place of a version of Triton: the compiler of CUDA C++ that comes with torch
NVRTC = "nvrtc"
TARGETS = ("sm_80", "sm_90")
#: registers and bytes of shared memory of a multiprocessor: CUDA C Programming Guide, table of compute capabilities
REGISTERS = 65536
SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}

EXAMPLES = """\
examples:
  python tests/kernels/instructions.py                          # every codec, Triton 3.6 and the installed one
  python tests/kernels/instructions.py --triton installed --only "kivi, 4 bit bf16"
  python tests/kernels/instructions.py --update --folder ~/tritons
"""


class Figures(NamedTuple):
    """Of one kernel for one target.

    registers, spills, blocks : a thread, bytes, and blocks that fit a multiprocessor.
    instructions : warp instructions of the page loop for every byte of codes, scales and zero points.
    wide : share of the bytes read in the loop that come by 16 bytes a thread; ahead : that come by asynchronous copies.
    barriers : of a block, for every page.
    """

    registers: int
    spills: int
    blocks: int
    instructions: float
    wide: float
    ahead: float
    barriers: int


#: figures by target and case
Counts = dict[str, dict[str, dict[str, float]]]


def main(argv: list[str] | None = None) -> int:
    """Count and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--triton",
        nargs="+",
        default=(*VERSIONS, NVRTC),
        metavar="VERSION",
        help=f"of Triton, or {NVRTC} for CUDA C++ (default: {' '.join(VERSIONS)} {NVRTC})",
    )
    parser.add_argument("--folder", type=Path, help="where Tritons are, or are put (default: a temporary one)")
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=pages_of(), help="names of kernel_tasks.py (default: all)"
    )
    parser.add_argument("--update", action="store_true", help="write what was counted to instructions.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        print(json.dumps(count_loops(options.only) if NVRTC in options.triton else count_all(options.only)))
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for version in options.triton:
            found = counted(version, options.folder or Path(temporary), options.only)
            print(found["compiler"])
            print("\n".join(listed(found["counts"])), flush=True)
            table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
            if options.update:
                kept = table.get(found["compiler"], {}) if options.only else {}
                table[found["compiler"]] = {t: kept.get(t, {}) | found["counts"][t] for t in TARGETS}
                TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")
            problems = differences(found["compiler"], found["counts"], table, options.only is None)
            for problem in problems:
                print(f"  {problem}", flush=True)
            failed = failed or bool(problems)
    if options.update:
        put_between(PAGE, "decode-instructions", published(json.loads(TABLE.read_text(encoding="utf-8"))))
    return int(failed)


def counted(version: str, folder: Path, only: list[str] | None = None) -> dict[str, Any]:
    """What :func:`count_all` says in a process in which ``version`` of Triton comes before the installed one."""
    path = [str(compilers.HERE), str(compilers.ROOT), str(compilers.ROOT / "kernels")]
    if version not in ("installed", NVRTC):
        path.insert(0, str(compilers.installed(version, folder)))
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--triton", version]
        command += ["--only", *only] if only else []
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def count_all(only: list[str] | None = None) -> dict[str, Any]:
    """Figures of the page loop of every case of packed pages, with the Triton of this process."""
    import triton
    from aot import build

    counts: Counts = {}
    for target in TARGETS:
        counts[target] = {}
        for name, (page_bytes, kernel) in pages_of().items():
            if only is None or name in only:
                # pages that are read apart come behind other keys
                task = [made for label, made in tasks(target, [name]).items() if label.startswith(f"{name}: {kernel}")][
                    -1
                ]
                built = build(task, target)
                warps = dict(task.options)["num_warps"]
                found = figures(disassembled(built.binary), target, warps, page_bytes, built)
                counts[target][name] = found._asdict()
    return {"compiler": f"Triton {'.'.join(triton.__version__.split('.')[:2])}", "counts": counts}


def count_loops(only: list[str] | None = None) -> dict[str, Any]:
    """Figures of the loop in CUDA C++ of every case that it reads."""
    from aot import Built
    from mmaccel_kernels import nvrtc
    from mmaccel_kernels.decode import cuda

    counts: Counts = {}
    for target in TARGETS:
        counts[target] = {}
        for name, (page_bytes, macros) in loops().items():
            if only is None or name in only:
                macros = cuda.built(macros, target)
                binary, said = nvrtc.compiled(cuda.SOURCE, tuple(macros.items()), target)
                registers = int(re.findall(r"Used (\d+) registers", said)[-1])
                built = Built(registers, nvrtc.spills(said), cuda.shared(macros), "", binary)
                units = macros["PAGE"] // macros["UNIT"]
                found = figures(disassembled(binary), target, cuda.THREADS // 32, page_bytes, built, units)
                counts[target][name] = found._asdict()
    return {"compiler": f"NVRTC {'.'.join(map(str, nvrtc.version()))}", "counts": counts}


def figures(code: str, target: str, warps: int, page_bytes: int, built: Any, turns: int | None = None) -> Figures:
    """Of disassembled ``code`` whose loop reads ``page_bytes`` in so many ``turns`` of single warps; by default one of each."""
    loop = page_loop(code)
    read: dict[tuple[int, bool], int] = {}
    for line in loop:
        if load := re.search(r"\b(LDG|LDGSTS)\.(\S+)", line):
            size = next((int(bits) // 8 for bits in re.findall(r"\.(64|128)\b", "." + load[2])), 0)
            size = size or next((int(bits) // 8 for bits in re.findall(r"\.[US](8|16)\b", "." + load[2])), 4)
            kind = (size, load[1] == "LDGSTS")
            read[kind] = read.get(kind, 0) + size
    total = sum(read.values())
    # a warp gets registers in portions of 256, and every block 1 KiB of shared memory for the system
    of_warp = -(-built.registers * 32 // 256) * 256
    blocks = min(REGISTERS // (of_warp * warps), SHARED[target] // (built.shared + 1024), 64 // warps)
    return Figures(
        built.registers,
        built.spills,
        blocks,
        round(len(loop) * (turns or warps) / page_bytes, 3),
        round(sum(n for (size, _), n in read.items() if size == 16) / max(total, 1), 2),
        round(sum(n for (_, ahead), n in read.items() if ahead) / max(total, 1), 2),
        sum("BAR.SYNC" in line or "BAR.RED" in line for line in loop),
    )


def page_loop(code: str) -> list[str]:
    """The instructions of the innermost loop with most matrix instructions."""
    lines = [x for x in code.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/|\.L_", x)]
    at = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith(".L_")}
    # what lies behind the end serves warps that are apart, and goes back to where they came from
    ends = [number for number, line in enumerate(lines) if re.search(r"\*/\s+EXIT\b", line)]
    loops = []
    for number, line in enumerate(lines[: ends[-1]] if ends else lines):
        target = re.search(r"\bBRA\b.*?`\((\.L_\w+)\)", line)
        if target and at[target[1]] < number:
            loops.append((at[target[1]], number))
    inner = [
        a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] and _products(lines, b) for b in loops)
    ]
    begin, end = max(inner, key=lambda loop: _products(lines, loop))
    return [line for line in lines[begin : end + 1] if not line.startswith(".L_") and not re.search(r"\bNOP\b", line)]


def _products(lines: list[str], loop: tuple[int, int]) -> int:
    return sum(bool(re.search(r"\b(HMMA|HGMMA)\.", line)) for line in lines[loop[0] : loop[1] + 1])


def disassembled(binary: bytes) -> str:
    """Machine code as text."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], stdout=subprocess.PIPE, text=True, check=True).stdout


def listed(counts: Counts) -> list[str]:
    """The figures as a table, a line each."""
    names = Figures._fields
    width = max(len(case) for of in counts.values() for case in of)
    said = [f"  {'':5} {'':{width}} " + " ".join(f"{name:>12}" for name in names)]
    for target, cases in counts.items():
        for case, found in cases.items():
            said.append(f"  {target} {case:{width}} " + " ".join(f"{found[name]:12g}" for name in names))
    return said


def published(table: dict[str, Counts]) -> str:
    """The figures for people: of every codec the loop in CUDA C++, and the instructions a byte of Triton's."""
    tritons = sorted(
        (name for name in table if name.startswith("Triton")), key=lambda x: [int(n) for n in x[7:].split(".")]
    )
    (cuda,) = sorted(name for name in table if name.startswith("NVRTC"))[-1:]
    heads = ["codec", f"instructions a byte, {cuda}", "registers", "blocks", *(f"by {name}" for name in tritons)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for case in table[cuda][TARGETS[-1]]:
        mine = [table[cuda][target][case] for target in TARGETS]
        cells = [" / ".join(f"{found[name]:g}" for found in mine) for name in ("instructions", "registers", "blocks")]
        cells += [
            " / ".join(f"{table[name][target][case]['instructions']:g}" for target in TARGETS) for name in tritons
        ]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    below = f"{' / '.join(TARGETS)}. Made by `python tests/kernels/instructions.py --update`; nothing here spills in CUDA C++."
    return "\n".join([*lines, "", below])


def differences(version: str, counts: Counts, table: dict[str, Counts], everything: bool) -> list[str]:
    """What the table says otherwise of what was counted, a sentence each."""
    if version not in table:
        return [f"instructions.json has no {version}; run tests/kernels/instructions.py --update with it."]
    said = []
    for target, cases in counts.items():
        known = table[version].get(target, {})
        for case, now in cases.items():
            for name, figure in now.items():
                then = known.get(case, {}).get(name)
                if figure != then:
                    said.append(f"{target}, {case}: {name} is {figure:g}, where the table has {then}.")
        if everything:
            said += [f"{target}, {case} is in the table, and nothing is launched so." for case in known.keys() - cases]
    return said


if __name__ == "__main__":
    sys.exit(main())
