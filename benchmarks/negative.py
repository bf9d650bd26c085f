"""What did not help: methods beside the baseline that they should beat, and small models beside a real language model, from
published results.

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


#: kept answers of small models, by the title of their column; where the first has none, its right answers count
SMALL = {
    "mini-llava, pictures": "answers-pictures",
    "mini-llava-deep, pictures": "answers-pictures-deep",
    "mini-qwen-vl, clips": "answers-clips",
}
RIGHT = "mini-llava-recipes"
#: kept answers of the shipped model around a real language model, in the same form
SEEING = {"mini-smol, pictures": "answers-pictures-smol", "mini-smol, documents": "answers-documents"}
#: right answers of the real language model, and those to other questions with other options
REAL, SETTINGS = "pages", "pages-settings-cpu"


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


def shares(name: str) -> dict[str, float]:
    """The shares of answers that are kept in a results file of a small model, by ``RECIPE:BUDGET``."""
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if name != RIGHT:
        return {title: sum(row["kept"]) / len(row["kept"]) for title, row in report["rows"].items()}
    found = {row["title"].replace(" ", ":"): row["figures"]["accuracy"] for row in report["rows"]}
    return {title: share / found["none"] for title, share in found.items()}


def counts(name: str, *apart: str) -> dict[str, tuple[int, int]]:
    """Right answers and questions in a results file of the real language model, by row, without the kinds ``apart``."""
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    kinds = {title: [pair for kind, pair in row["kinds"].items() if kind not in apart] for title, row in rows.items()}
    return {title: (sum(k["right"] for k in one), sum(k["asked"] for k in one)) for title, one in kinds.items()}


def grounds() -> str:
    """Small models beside the real language model, for all recipes that both were asked about at one budget, the largest
    difference first; and what other options change, on other questions."""
    real, tried = counts(REAL), counts(SETTINGS, "later")
    small = [shares(name) for name in SMALL.values()]
    first = {**shares(RIGHT), **small[0]}
    differ = {title: right / asked - first[title] for title, (right, asked) in real.items() if title in first}
    lines = [["recipe", "budget", *SMALL, "real model, pages", "difference", "with other options"]]
    for title in sorted(differ, key=lambda title: (differ[title], title)):
        if title == "none":
            continue
        name, _, budget = title.partition(":")
        known = [percent(one[title]) if title in one else "" for one in small]
        known[0] = known[0] or f"{percent(first[title])} right"
        right, asked = real[title]
        low, high = interval(right, asked)
        options = [
            f"`{other.removeprefix(f'{name}:{budget}:')}` {of[0]} of {of[1]}"
            for other, of in tried.items()
            if other.startswith(f"{name}:{budget}:")
        ]
        default = [f"default {tried[title][0]} of {tried[title][1]}"] if options and title in tried else []
        share = f"{percent(right / asked)} ({100 * low:.0f} to {100 * high:.0f})"
        lines.append(
            [f"`{name}`", budget, *known, share, f"{100 * differ[title]:+.0f}", ", ".join([*default, *options])]
        )
    about = json.loads((RESULTS / f"{SETTINGS}.json").read_text(encoding="utf-8"))
    return f"{markdown(lines)}\n\nOther options: `{about['command']}`, {about['date']}; not all rows were asked all."


def seeing() -> str:
    """Kept answers of small models beside those of the model around a real language model, for all recipes with a budget that
    both were asked about pictures, those first that differ most from the first small model."""
    small = [shares(name) for name in list(SMALL.values())[:2]]
    real = [dict(shares(name)) for name in SEEING.values()]
    for one in real:
        # of a picture it is that rule, and so it is called in the older tables
        one |= {title.replace("balanced", "spacetime"): share for title, share in one.items()}
    lines = [["recipe", "budget", *list(SMALL)[:2], *SEEING, "difference"]]
    for title in sorted(
        (title for title in real[0] if title in small[0]), key=lambda title: real[0][title] - small[0][title]
    ):
        name, _, budget = title.partition(":")
        if budget:
            known = [percent(one[title]) if title in one else "" for one in (*small, *real)]
            lines.append([f"`{name}`", budget, *known, f"{100 * (real[0][title] - small[0][title]):+.0f}"])
    return markdown(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the tables between the marks of this page")
    args = parser.parse_args()
    for name, text in {"negative": table(), "grounds": grounds(), "seeing": seeing()}.items():
        print(text, end="\n\n")
        if args.update:
            put_between(args.update, name, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
