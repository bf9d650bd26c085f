"""Measure the heads of your model, once, for cache policies that treat heads by what they do.

Some heads look far back for what was said, others only at the first and the last tokens. razorattention and duoattention keep
all keys of the former and few of the latter; qfilter keeps the keys along the direction in which the queries of a head lie. All
read what this command measures:

\b
  echo, induction   attention to copies of a token and to what follows them, in random tokens repeated  (razorattention)
  gates             how far back a head attends from its mean query                                     (duoattention)
  filters           the main direction of a head's queries                                              (qfilter)

The random tokens are drawn; the rest is measured on the prompts of --data (JSONL with a question a line, as for mmaccel eval)
or of the generated suite, which are read and not answered. No gradients and no labels are needed.

The command writes one file with a fingerprint of the model; policies refuse it for any other. FILE.part holds what was measured
so far: started again with the same settings, the command resumes. Use the file as an option, or leave it beside the model's
weights as calibration.safetensors:

\b
  accelerate_vlm(model, "duoattention", calibration="calibration.safetensors")
  mmaccel eval --model ./my-qwen --recipe duoattention --set calibration=calibration.safetensors --data others.jsonl

The exit status is 3 if some samples could not be used (they are named).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .shared import measure
from .shared.options import Frames, Json, ModelOptions
from .shared.text import json_file, table, tell

PLACE = 6
METHODS = False
HELP = "measure the heads of your model, for razorattention, duoattention and qfilter"
EXAMPLES = """\
examples:
  mmaccel calibrate --model ./my-qwen --data questions.jsonl
  mmaccel calibrate --model ./my-qwen --suite image document --limit 4 -o my-qwen/calibration.safetensors
  mmaccel calibrate --limit 2 --period 32
"""


def run(
    context: typer.Context,
    which: ModelOptions,
    suite: measure.Suite = None,
    data: measure.Data = None,
    limit: measure.Limit = None,
    frames: Frames = 16,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the figures are written.")] = Path(
        "calibration.safetensors"
    ),
    period: Annotated[int, typer.Option(min=2, metavar="N", help="Random tokens that are repeated.")] = 256,
    repeats: Annotated[int, typer.Option(min=2, metavar="N", help="How many times they are repeated.")] = 4,
    output: Json = None,
) -> int:
    """Read, measure, write."""
    from ..programs.calibrate import calibrate

    json_file(output)
    task = measure.Run(measure.Asked(suite, data, limit, frames=frames), which, context.obj, None, split="train")
    made = task.call("measuring heads", calibrate, out=out, period=period, repeats=repeats)
    rows = [("figures", "layers", "heads", "least", "most")]
    for name, of in made.figures.items():
        each = [x for x in of.values() if x.dim() == 1]
        ends = (
            (f"{min(float(x.min()) for x in each):.2g}", f"{max(float(x.max()) for x in each):.2g}")
            if each
            else ("", "")
        )
        rows.append((name, str(len(of)), str(sum(len(x) for x in of.values())), *ends))
    report = {"written": str(out), "figures": {name: len(of) for name, of in made.figures.items()}, **made.record}
    tell(report, output, lambda: f"{table(rows, range(1, 5))}\n\nwritten: {out}")
    return task.finish()
