"""Search the recipe that keeps a model's answers to your questions and spends least.

No expected answers are needed: an answer is kept if the model writes the same one with the recipe. Recipes that work on this
model and these samples are taken alone and together, with their budgets, layers and options; few questions are asked first, and
ever fewer recipes are asked the others. Three in ten samples are held out for the final figure, which is shown with its 95 %
interval. A line of --data is that of mmaccel eval.

Written are the recipe, which accelerate_vlm(model, "recipe.json") and every --recipe take, and beside it a report (.html, .png)
and the journal of the search (.journal): started again with the same settings, it resumes where it was interrupted. With others
(another model, a changed sample, another method's code) the journal is refused. A warning says if the recipe keeps less of the
held-out samples than --keep asks for.

The exit status is 3 if no recipe keeps enough (the front is shown), or if some samples could not be used (they are named).
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
HELP = "search the recipe that spends least and keeps the answers to your questions"
EXAMPLES = """\
examples:
  mmaccel tune --model ./my-qwen --data questions.jsonl --keep 0.99 --goal ttft -o recipe.json
  mmaccel tune --model ./my-qwen --data questions.jsonl --keep 0.95 --confidence 0.9 --goal kv -o small-cache.json
  mmaccel tune --suite image --trials 100 --minutes 10 --goal tokens -o pictures.json
"""


def run(
    context: typer.Context,
    which: ModelOptions,
    asked: measure.Asked,
    keep: Annotated[float, typer.Option(metavar="SHARE", help="Share of the answers that must be kept.")] = 0.99,
    goal: Annotated[
        Literal["ttft", "tokens", "kv", "cost"],
        typer.Option(
            help="What is saved: operations of tower and prefill; visual tokens a layer; bytes of the KV cache; or the mean of "
            "the shares of operations and bytes."
        ),
    ] = "ttft",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Recipe to write; reports lie beside it.")
    ] = Path("recipe.json"),
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="RECIPE...", help="Search among these, alone and together.  [default: all there are]"),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Take only a recipe of which the held-out samples show so surely that it does."
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, metavar="N", help="Recipes to try, those of earlier runs included.")
    ] = 300,
    minutes: Annotated[
        float | None, typer.Option(min=0, metavar="N", help="Time for trying them.  [default: no limit]")
    ] = None,
    seconds: Annotated[
        bool, typer.Option("--measure", help="Time to first token in measured seconds, not in operations.")
    ] = False,
    output: Json = None,
) -> int:
    """Search, show the front, write."""
    from ..programs.tune import report
    from ..programs.tune.tuning import tune

    json_file(output)
    task = measure.Run(asked, which, context.obj, None)
    try:
        with working("trying recipes", trials) as bar:
            tuned = tune(
                task.model,
                task.processor,
                task.questions,
                keep=keep,
                goal=goal,
                out=out,
                recipes=recipe or None,
                confidence=confidence,
                trials=trials,
                minutes=minutes,
                measure=seconds,
                batch_size=asked.batch_size,
                max_new_tokens=asked.max_new_tokens,
                complain=task.complaints.append,
                progress=bar.part,
            )
    except MmaccelError:
        # the samples that were left out may be why
        task.finish()
        raise
    rows = report.rows(tuned)
    written = [*([out] if tuned.recipe is not None else []), out.with_suffix(".html"), out.with_suffix(".png")]

    def text() -> str:
        named = ", ".join(map(str, written))
        return f"{table(rows, numbers=range(2, len(rows[0])))}\n\n{report.verdict(tuned)}\nwritten: {named}"

    if before := tuned.report["tried by earlier runs"]:
        print(f"{before} recipes are taken over from {out.with_suffix('.journal')}", file=sys.stderr)

    tell({"verdict": report.verdict(tuned), "front": rows, **tuned.report}, output, text)
    return max(task.finish(), 0 if tuned.recipe is not None else measure.PARTIAL)
