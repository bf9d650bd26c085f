"""Every kernel, compiled ahead of time by each Triton that people have, for NVIDIA and AMD; no GPU is needed.

Triton comes with torch, and which one decides whether a kernel compiles and whether it spills registers to memory. Each version
is installed to a folder of its own and runs in processes of its own. What every configuration spills must be what the table
beside this file says, to the byte: one that spills more, a new one, and one that spills less all fail. The figures are the
assembler's (ptxas, and the metadata of the code object on AMD); --update writes them down anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kernel_tasks import TARGETS, cases, tasks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = HERE / "spills.json"
#: the oldest that is supported, that of the machine the benchmarks were made for, and the one that is installed
VERSIONS = ("3.4", "3.6", "installed")

EXAMPLES = """\
examples:
  python tests/kernels/compilers.py                            # the installed Triton, 3.4 and 3.6, in two processes
  python tests/kernels/compilers.py --triton 3.6 --folder ~/tritons
  python tests/kernels/compilers.py --update                   # after a change of a kernel: measure, and write the table
  python tests/kernels/compilers.py --only "compact, merged" "kivi, 2 bit bf16"
"""

#: spilled bytes by target and configuration, those that spill none left out
Spills = dict[str, dict[str, int]]


def main(argv: list[str] | None = None) -> int:
    """Compile and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--triton", nargs="+", default=VERSIONS, metavar="VERSION", help=f"default: {' '.join(VERSIONS)}"
    )
    parser.add_argument("--folder", type=Path, help="where Tritons are, or are put (default: a temporary one)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at once (default: 2)")
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=cases(), help="names of kernel_tasks.py (default: all)"
    )
    parser.add_argument("--update", action="store_true", help="write what was measured to spills.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        print(json.dumps(compile_all(options.jobs, options.only)))
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for version in options.triton:
            begin = time.monotonic()
            found = measured(version, options.folder or Path(temporary), options.jobs, options.only)
            table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
            problems = found["failed"] or differences(found, table)
            if options.update and not found["failed"]:
                table[found["triton"]] = updated(found, table)
                order = sorted(table.items(), key=lambda x: tuple(map(int, x[0].split("."))))
                TABLE.write_text(json.dumps(dict(order), indent=1) + "\n", encoding="utf-8")
                problems = []
            count, spent = found["count"], time.monotonic() - begin
            print(f"Triton {found['triton']}: {count} compiled in {spent:.0f} s, {len(problems)} problems", flush=True)
            for problem in problems:
                print(f"  {problem}", flush=True)
            failed = failed or bool(problems)
    return int(failed)


def measured(version: str, folder: Path, jobs: int = 2, only: list[str] | None = None) -> dict[str, Any]:
    """What :func:`compile_all` says in a process in which ``version`` of Triton comes before the installed one."""
    path = [str(HERE), str(ROOT), str(ROOT / "kernels")]
    if version != "installed":
        path.insert(0, str(installed(version, folder)))
    with tempfile.TemporaryDirectory() as cache:
        # one that remembers nothing: what is not assembled is not reported
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, str(HERE / "compilers.py"), "--worker", "--jobs", str(jobs)]
        command += ["--only", *only] if only else []
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert version == "installed" or found["triton"] == version, f"{found['triton']} ran, not {version}"
    return found


def installed(version: str, folder: Path) -> Path:
    """A folder with that Triton and nothing else."""
    target = folder / f"triton-{version}"
    if not (target / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, f"triton=={version}.*"], check=True)
    return target


def compile_all(jobs: int, only: list[str] | None = None) -> dict[str, Any]:
    """All configurations for all targets with the Triton of this process; of ``only`` these cases."""
    import triton

    spills: Spills = {target: {} for target in TARGETS}
    failed: list[str] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {
            pool.submit(_build, task, target): (target, name)
            for target in TARGETS
            # the longest first
            for name, task in reversed(tasks(target, only).items())
        }
        for future in as_completed(waiting):
            target, name = waiting[future]
            if problem := future.result()[1]:
                failed.append(f"{target}, {name}: {problem}")
            elif spilled := future.result()[0]:
                spills[target][name] = spilled
    version = ".".join(triton.__version__.split(".")[:2])
    ordered = {target: dict(sorted(found.items())) for target, found in spills.items()}
    names = sorted({name for _, name in waiting.values()})
    return {
        "triton": version,
        "only": only,
        "names": names,
        "count": len(waiting),
        "spills": ordered,
        "failed": sorted(failed),
    }


def _build(task: Any, target: str) -> tuple[int, str]:
    """Spilled bytes, and what went wrong."""
    from aot import SHARED_LIMIT, build

    try:
        built = build(task, target)
    except Exception as error:
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        return 0, f"cannot be compiled: {' '.join(str(error).split())[-300:]}"
    if built.shared > SHARED_LIMIT[target]:
        return 0, f"takes {built.shared} bytes of shared memory, more than the {SHARED_LIMIT[target]} there are"
    return built.spills, ""


def differences(found: dict[str, Any], table: dict[str, Spills]) -> list[str]:
    """What the table says otherwise of what was measured, a sentence each."""
    version = found["triton"]
    if version not in table:
        return [f"spills.json has no Triton {version}; run tests/kernels/compilers.py --update with it."]
    said = []
    for target, name, then in _listed(found, table[version]):
        now = found["spills"][target].get(name, 0)
        if now > then:
            said.append(f"{target}, {name}: spills {now} bytes, where the table has {then}.")
        elif now < then:
            said.append(f"{target}, {name}: spills {now} bytes; the table is stale with {then}.")
    if not found["only"]:
        known = {name for names in table[version].values() for name in names} - {*found["names"]}
        said += [f"{name} is in the table, and nothing is launched so." for name in sorted(known)]
    return said


def updated(found: dict[str, Any], table: dict[str, Spills]) -> Spills:
    """The table's part for this Triton with what was measured; of configurations that were not, as it was."""
    if not found["only"]:
        return found["spills"]
    made = {}
    for target, spills in found["spills"].items():
        others = table.get(found["triton"], {}).get(target, {}).items()
        kept = {name: spilled for name, spilled in others if name not in found["names"]}
        made[target] = dict(sorted((kept | spills).items()))
    return made


def _listed(found: dict[str, Any], table: Spills) -> list[tuple[str, str, int]]:
    """Target, name and bytes in the table of everything that was measured."""
    return [(target, name, table.get(target, {}).get(name, 0)) for target in found["spills"] for name in found["names"]]


if __name__ == "__main__":
    sys.exit(main())
