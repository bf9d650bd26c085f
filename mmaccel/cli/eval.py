"""Measure how a recipe changes answers, on the generated suite or on questions of your own.

Every question is asked in full and accelerated. Shown are: accuracy (the same words as the expected answer, whatever their
case and final stop; for a box an overlap of half) and the share of answers that equal the unaccelerated ones, both with exact
95 % intervals (Clopper-Pearson), which more questions narrow; the KL divergence of the accelerated next-token distributions
from the unaccelerated ones in nats, a mean over the tokens of the unaccelerated answer, which both models are made to write;
and, a question, the visual tokens that reach the last layer, their mean over the layers as a share of all, and the bytes of
the KV cache at the end of that answer (padding of the batch included).

A line of --data is a JSON object: "question", and "image" (a path or a list of paths) or "video" (a path); "answer", "id" and
"task" are optional. Paths are relative to the file. Lines, pictures and videos that cannot be used are named and left out, and
for one recipe questions that it cannot answer; the exit status is then 3.

With --json FILE, the command resumes an earlier run with the same settings, and reports what it resumes. A recipe whose values,
code, files or drafts changed is run again, and all are if questions or pictures changed.

With --lossless, --draft or --lookup the recipes answer with drafts. Shown are, too, the drafted tokens that were accepted, the
tokens of a row that a forward commits, and the forwards that were saved. With --fallback visual tokens are those of all
readings of an answer, and the share of answers that were read again is shown.
"""

from __future__ import annotations

import typer

from .shared import measure
from .shared.options import AnswerOptions, Budgets, Json, ModelOptions, Recipes, Settings, settings
from .shared.text import json_file, show

PLACE = 3
HELP = "accuracy and agreement of a recipe, on a task suite or a JSONL of your own"
EXAMPLES = """\
examples:
  mmaccel eval --recipe divprune --retain 0.5 0.25 0.1
  mmaccel eval --recipe fastv --suite reading count --limit 100 --json fastv.json
  mmaccel eval --model ./my-qwen --recipe uniform --retain 0.25 --data questions.jsonl --batch-size 4
  mmaccel eval --recipe divprune --retain 0.1 --lossless --lookup
  mmaccel eval --recipe divprune --retain 0.1 --fallback 0.9

a line of questions.jsonl:
  {"image": "photos/cat.jpg", "question": "What animal is this?", "answer": "cat"}
"""


def run(
    context: typer.Context,
    which: ModelOptions,
    asked: measure.Asked,
    drafts: AnswerOptions,
    recipe: Recipes = None,
    retain: Budgets = None,
    set: Settings = None,
    output: Json = None,
) -> int:
    """Measure and print."""
    path = json_file(output)
    rows = measure.rows(recipe or ["balanced"], retain, settings(set), drafts.arguments())
    task = measure.Run(asked, which, context.obj, path)
    report = task.evaluate(rows, keep_answers=True)
    show(report, output, lambda: measure.render(report))
    return task.finish()
