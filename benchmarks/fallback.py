"""How many tokens are read when unsure answers fall back, and how many answers are kept?

For every set of questions and recipe it finds budgets and a threshold, as ``mmaccel tune --fallback`` does, on seven in ten
questions, and measures the choice on the others. Beside it is what a judge would read who knew the answers of the bare model.
Rows that are in the file are not measured again, and an interrupted row goes on where it was.

    python benchmarks/fallback.py --questions 240 --out benchmarks/results/fallback-cpu.json --update docs/guides/fallback.md
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from answers import KINDS, asked, write
from tqdm import tqdm

from mmaccel import load
from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.programs.bench import provenance
from mmaccel.programs.tune.fallback import find_fallback

SETS = ("pictures", "pictures-qwen", "clips", "pictures-deep")
RECIPES = ("divprune", "balanced", "coverage", "learned")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Fill the report row by row."""
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    run = {
        "command": provenance.command("python", "benchmarks/fallback.py", arguments=sys.argv[1:]),
        "date": provenance.today(),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "versions": provenance.versions(),
    }
    for kind in options.sets:
        model, processor = load(KINDS[kind][0], device="cpu", dtype="float32")
        for recipe in options.recipes:
            title = f"{kind} {recipe} {options.keep}"
            if title in report["rows"]:
                continue
            with tqdm(total=options.questions, desc=title, unit="question") as bar:
                found = find_fallback(
                    model,
                    processor,
                    asked(kind, options.questions),
                    recipe,
                    keep=options.keep,
                    out=options.out.with_name(f".fallback-{kind}-{recipe}.json"),
                    progress=lambda what, done, of, bar=bar: bar.update(done - bar.n),
                )
            report["rows"][title] = {"set": kind, **found.report, "run": run}
            write(options.out, report)
    return report


def table(report: dict[str, Any]) -> list[list[str]]:
    """A row for every set and recipe, the head first."""
    head = [
        "questions",
        "recipe",
        "alone at 10 %",
        "with the fallback, held out",
        "tokens read",
        "a perfect judge reads",
    ]
    rows = [head]
    for row in report["rows"].values():
        alone = next(one["kept"] for one in row["alone"] if one["retain"] == 0.1)
        seen = ["none keeps enough", "-"]
        if held := row.get("held out"):
            low, high = held["interval"]
            share = f"{percent(held['kept'])} of {held['questions']} ({percent(low)} to {percent(high)})"
            seen = [share, percent(held["tokens read"])]
        rows.append(
            [row["set"], f"`{row['recipe']}`", percent(alone), *seen, percent(row["tokens of a perfect judge"])]
        )
    return rows


def origin(report: dict[str, Any]) -> str:
    """Command, date, machine and versions of every run that has rows, one below the other."""
    lines = []
    for run in (row["run"] for row in report["rows"].values()):
        versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
        lines.append(f"`{run['command']}`, {run['date']}, {run['machine']}, {versions}.")
    return "\n\n".join(dict.fromkeys(lines))


def main() -> int:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=KINDS, default=SETS)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--questions", type=int, default=240, help="of each set, 3 in 10 of them held out")
    parser.add_argument("--keep", type=float, default=0.99, help="share of the answers that must be kept")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON; an existing one is completed")
    parser.add_argument("--update", type=Path, help="page of the documentation that shows the table")
    options = parser.parse_args()
    report = measure(options)
    text = f"{markdown(table(report))}\n\n{origin(report)}"
    print(text)
    if options.update is not None:
        put_between(options.update, "fallback", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
