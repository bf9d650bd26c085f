"""Measure what a recipe costs in answers, on the generated suite or on questions of your own.

Every question is asked in full and accelerated. Shown are: accuracy (the same words as the expected answer, whatever their
case and final stop; for a box an overlap of half); the share of answers that equal the unaccelerated ones; the KL divergence
of the accelerated next-token distributions from the unaccelerated ones in nats, a mean over the tokens of the unaccelerated
answer, which both models are made to write; and, a question, the visual tokens that reach the last layer, their mean over the
layers as a share of all, and the bytes of the KV cache at the end of that answer (padding of the batch included).

A line of --data is a JSON object: "question", and "image" (a path or a list of paths) or "video" (a path); "answer", "id" and
"task" are optional. Paths are relative to the file. Lines, pictures and videos that cannot be used are named and left out; the
exit status is then 3.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .ask import retain
from .shared import measure

PLACE = 3
JSON_FILE = True
HELP = "accuracy and agreement of a recipe, on a task suite or a JSONL of your own"
EXAMPLES = """\
examples:
  mmaccel eval --recipe divprune --retain 0.5 0.25 0.1
  mmaccel eval --recipe fastv --suite reading count --limit 100 --json fastv.json
  mmaccel eval --model ./my-qwen --recipe uniform --retain 0.25 --data questions.jsonl --batch-size 4

a line of questions.jsonl:
  {"image": "photos/cat.jpg", "question": "What animal is this?", "answer": "cat"}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mmaccel eval``."""
    parser.add_argument("--recipe", default="balanced", help="recipe, method or JSON file (default: balanced)")
    parser.add_argument(
        "--retain", type=retain, nargs="+", metavar="BUDGET", help="budgets, shares or counts (default: the recipe's)"
    )
    measure.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    from ..programs.evaluate import Row

    rows = [Row("none"), *(Row(options.recipe, budget) for budget in options.retain or [None])]
    rows = list({row.title: row for row in rows}.values())
    task = measure.Run(options, Path(options.json) if options.json not in (None, "-") else None)
    report = task.evaluate(rows, keep_answers=True)
    print(json.dumps(report, indent=2) if options.json == "-" else measure.render(report))
    return task.finish()
