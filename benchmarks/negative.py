"""What did not help: methods beside the baseline that they should beat, from published results.

python benchmarks/negative.py --update docs/results/negative.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.programs.tune.confidence import interval

RESULTS = Path(__file__).parent / "results"
#: of a results file: a row, the row it should beat, and what the second one is to the first
PAIRS = {
    "mini-llava-recipes": (
        ("vtc-cls 0.25", "random 0.25", "chance"),
        ("hired 0.25", "random 0.25", "chance"),
        ("attention-received 0.25", "random 0.25", "chance"),
        ("fopru 0.25", "random 0.25", "chance"),
        ("evit 0.25", "random 0.25", "chance"),
        ("fastv 0.25", "uniform 0.25", "even spacing, with fewer tokens a layer"),
        ("promptdistill-layer2 0.25", "uniform 0.25", "even spacing, with fewer tokens a layer"),
        ("visionzip 0.25", "uniform 0.25", "even spacing"),
        ("pitome 0.25", "tome 0.25", "plain merging in the tower"),
        ("prumerge-plus 0.1", "uniform 0.1", "even spacing"),
        ("pool 0.1", "uniform 0.1", "even spacing"),
        ("d2o 0.25", "h2o 0.25", "the same scores without merging or budgets of layers"),
        ("knorm 0.25", "streaming-llm 0.25", "sinks and the newest keys"),
        ("snapkv 0.1", "streaming-llm 0.1", "sinks and the newest keys"),
    ),
    "mini-llava-positions": (
        ("uniform-paper 0.25", "uniform-keep 0.25", "the same tokens at their places"),
        ("divprune-paper 0.25", "divprune-keep 0.25", "the same tokens at their places"),
    ),
}


def right(row: dict[str, Any]) -> str:
    """The share of right answers and its interval."""
    figures = row["figures"]
    asked = figures["questions"]
    low, high = interval(round(figures["accuracy"] * asked), asked)
    return f"{percent(figures['accuracy'])} ({100 * low:.0f} to {100 * high:.0f})"


def table() -> str:
    """One line a method, by results file."""
    parts = []
    for name, pairs in PAIRS.items():
        report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        rows = {row["title"]: row for row in report["rows"]}
        lines = [["tried", "right answers", "beside", "right answers", "which is"]]
        for tried, beside, what in pairs:
            lines.append([f"`{tried}`", right(rows[tried]), f"`{beside}`", right(rows[beside]), what])
        asked = report["rows"][0]["figures"]["questions"]
        parts.append(f"{markdown(lines)}\n\n{asked} questions, `mini-llava`: `{report['command']}`, {report['date']}.")
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the tables between the marks of this page")
    args = parser.parse_args()
    print(text := table())
    if args.update:
        put_between(args.update, "negative", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
