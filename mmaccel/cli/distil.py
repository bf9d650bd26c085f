"""Train a selector: a small network that selects the visual tokens your model needs for your pictures and questions.

No labels are needed. The frozen model answers the questions once; the network learns with which tokens the model still gives
these answers, and what to add to them from the dropped ones. --data is a JSONL file with a question a line, as for mmaccel
eval, or a folder of pictures and videos, all of which are asked --ask. By default the network reads the question too; --blind
trains one that does not, which can reduce a picture before there is a question (as vLLM does).

The command writes a folder with the network, a report, its curves, and work/ with intermediate results. Started again with
the same settings, it resumes; with others (another model, a changed question or picture) it refuses the folder. work/ may be
deleted in the end. Use the selector as a recipe:

\b
  accelerate_vlm(model, Learned("selector/"), retain=0.1)
  mmaccel eval --model ./my-qwen --recipe selector/ --retain 0.1 --data others.jsonl

A selector works only with the model that it was trained for. The recipe "learned" takes the selector in the folder "selector"
next to the model's weights; in vLLM, where it must not read the question, that in "selector-blind".

The exit status is 3 if some samples could not be used (they are named).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import MmaccelError
from .shared import measure
from .shared.options import Json, ModelOptions
from .shared.text import json_file, table, tell

PLACE = 5
METHODS = False
EXTRA = "bench"
HELP = "train a small network that keeps the tokens your questions need"
EXAMPLES = """\
examples:
  mmaccel distil --model ./my-qwen --data questions.jsonl -o selector/
  mmaccel distil --model ./my-qwen --data photos/ --ask "Describe the picture." --blind -o selector/
  mmaccel distil --suite image --limit 200 --steps 1500 -o pictures/
"""


def run(
    context: typer.Context,
    which: ModelOptions,
    asked: measure.Asked,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the selector is written.")] = Path(
        "selector"
    ),
    ask: Annotated[
        str | None, typer.Option(metavar="QUESTION", help="What is asked about every picture and video of a folder.")
    ] = None,
    blind: Annotated[bool, typer.Option("--blind", help="Train a network that does not read the question.")] = False,
    select_only: Annotated[
        bool,
        typer.Option(
            "--select-only",
            help="Only choose tokens. Otherwise the network also adds a residual to the kept tokens, which keeps more answers, "
            "and the training takes gradients through the language model.",
        ),
    ] = False,
    target: Annotated[
        Literal["answers", "effect", "attention"],
        typer.Option(
            help="What it learns from: how the model's answers change with the tokens that it picks; or, with less work, "
            "how much the answer depends on each token, or the attention to it in the layer whose attention keeps the answers "
            "best, which needs no gradient of the model."
        ),
    ] = "answers",
    retain: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the tokens at which answers are compared.")
    ] = 0.1,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Batches to learn from at most.")] = 3000,
    minutes: Annotated[
        float | None, typer.Option(min=0, metavar="N", help="Time for learning.  [default: no limit]")
    ] = None,
    output: Json = None,
) -> int:
    """Read, train, measure, write."""
    from ..programs.distil import report
    from ..programs.distil.training import distil

    json_file(output)
    if ask is None and asked.data is not None and asked.data.is_dir():
        raise MmaccelError(
            f"--data {str(asked.data)!r} is a folder; give --ask QUESTION with it, or a JSONL file with a question a line."
        )
    task = measure.Run(asked, which, context.obj, None, split="train", about=ask)
    options = {"out": out, "target": target, "question": not blind, "residual": not select_only, "retain": retain}
    result = task.call("reading watched questions", distil, **options, **task.answering, steps=steps, minutes=minutes)
    if before := result.report["steps of earlier runs"]:
        print(f"{before} steps are taken over from {out / 'work' / 'state.pt'}", file=sys.stderr)
    rows, verdict = report.rows(result), report.verdict(result)
    text = f"{table(rows, range(1, len(rows[0])))}\n\n{verdict}\nwritten: {out}"
    tell({"verdict": verdict, **result.report}, output, lambda: text)
    return task.finish()
