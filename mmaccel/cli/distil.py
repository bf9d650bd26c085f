"""Train a selector: a small network that says which visual tokens your model needs, for your pictures and questions.

No labels are needed. The frozen model answers the questions once; the network learns with which tokens it still gives these
answers, and what to add to them of what the others showed. --data is a JSONL file with a question a line, as mmaccel eval
takes it, or a folder of pictures and videos, each of which is asked --ask. By default the network reads the question too;
--blind trains one that does not, with which a picture can be reduced before anybody asks (as vLLM does).

Written is a folder with the network, a report, its curves, and work/, which holds what the model read: started again with
the same settings, the training resumes where it was interrupted; with others (another model, a changed question or picture) it
is refused. work/ may be deleted in the end. Use it as a recipe:

\b
  accelerate_vlm(model, Learned("selector/"), retain=0.1)
  mmaccel eval --model ./my-qwen --recipe selector/ --retain 0.1 --data others.jsonl

A selector belongs to the model that it was trained for, and another model refuses it. One in the folder "selector" beside a
model's weights is what recipe "learned" takes.

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
from .shared.text import json_file, table, tell, working

PLACE = 5
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
            help="Only choose tokens. Else the network also says what to add to those that stay, which keeps more answers, and "
            "the training takes gradients through the language model.",
        ),
    ] = False,
    target: Annotated[
        Literal["answers", "effect", "attention"],
        typer.Option(
            help="What it learns from: what becomes of the model's answers with the tokens that it picks; or, with less work, "
            "how much the answer hangs on each token, or what the token is paid in the layer whose attention keeps the answers "
            "best, which needs no gradient of the model."
        ),
    ] = "answers",
    retain: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the tokens at which answers are looked at.")
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
            f"{str(asked.data)!r} is a folder, which says nothing of what is asked; give --ask QUESTION, or a JSONL file with "
            "a question a line."
        )
    task = measure.Run(asked, which, context.obj, None, split="train", about=ask)
    try:
        with working("reading watched questions", 1) as bar:
            made = distil(
                task.model,
                task.processor,
                task.questions,
                out=out,
                target=target,
                question=not blind,
                residual=not select_only,
                retain=retain,
                steps=steps,
                minutes=minutes,
                batch_size=asked.batch_size,
                max_new_tokens=asked.max_new_tokens,
                complain=task.complaints.append,
                progress=bar.part,
            )
    except MmaccelError:
        # the samples that were left out may be why
        task.finish()
        raise
    rows = report.rows(made)

    def text() -> str:
        return f"{table(rows, numbers=range(1, len(rows[0])))}\n\n{report.verdict(made)}\nwritten: {out}"

    if before := made.report["steps of earlier runs"]:
        print(f"{before} steps are taken over from {out / 'work' / 'state.pt'}", file=sys.stderr)
    tell({"verdict": report.verdict(made), **made.report}, output, text)
    return task.finish()
