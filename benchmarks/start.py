"""How long is it before anything happens? Seconds of CPU until ``import mmaccel`` and ``mmaccel --help`` are done.

Every sample is a process of its own, and what counts is the CPU time of its threads, which a busy machine changes little.
Beside them stands Python doing nothing, and what is waited for where work begins: the model class of transformers.

    python benchmarks/start.py --out benchmarks/results/start-cpu.json --update benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from mmaccel.cli import commands
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.programs.bench import provenance

#: what a process does, by what it is called in the table
STARTS = {
    "python": ["-c", "pass"],
    "import mmaccel": ["-c", "import mmaccel"],
    "mmaccel --help": ["-m", "mmaccel", "--help"],
    **{f"mmaccel {name} --help": ["-m", "mmaccel", name, "--help"] for name in commands()},
    "import torch": ["-c", "import torch"],
    "from mmaccel import accelerate_vlm": ["-c", "from mmaccel import accelerate_vlm"],
}


def spent(arguments: list[str]) -> float:
    """Seconds of CPU of one process, compiled files being there."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(repeats: int) -> dict[str, Any]:
    """Samples of every start, in turn; the first round, which compiles, does not count."""
    samples: dict[str, list[float]] = {name: [] for name in STARTS}
    for number in range(repeats + 1):
        for name, arguments in STARTS.items():
            taken = spent(arguments)
            if number:
                samples[name].append(round(taken, 4))
    return {
        "command": provenance.command("python", "benchmarks/start.py"),
        "date": provenance.today(),
        "machine": provenance.processor(),
        "versions": provenance.versions(("torch", "transformers", "mmaccel", "typer", "rich")),
        "cpu_seconds": samples,
    }


def table(report: dict[str, Any]) -> str:
    """The figures, and where they come from."""
    rows = [["", "CPU seconds, median", "lowest", "highest"]]
    for name, found in report["cpu_seconds"].items():
        rows.append([f"`{name}`", *(f"{one:.2f}" for one in (statistics.median(found), min(found), max(found)))])
    about = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return f"{markdown(rows)}\n\n`{report['command']}`, {report['date']}, {report['machine']}, {about}."


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="processes of each (default: 5)")
    parser.add_argument("--out", type=Path, help="JSON of the samples to write")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="Markdown file whose table is made anew")
    options = parser.parse_args(argv)
    report = measure(options.repeats)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.update is not None:
        put_between(options.update, "start", table(report))
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
