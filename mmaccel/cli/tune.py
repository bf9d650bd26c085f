"""Search for the cheapest recipe that keeps a model's answers to your questions.

No expected answers are needed: an answer is kept if the model writes the same one with the recipe. The search tries all recipes
that work on this model, alone and combined, with their budgets, layers and options, on few questions first and on more as long
as they do well. Three in ten samples are held out; the final figure is measured on them, with its 95 % interval. --data is as
for mmaccel eval.

The command writes the recipe, for accelerate_vlm(model, "recipe.json") and every --recipe, and next to it a report (.html,
.png) and a journal (.journal). Started again with the same settings, it resumes; with others (another model, a changed
sample, changed code of a method) it refuses the journal. It also prints the whole recipe, as a line of Python and as a command.

With --fallback the command finds a safety net for one recipe instead: budgets, and how sure the model must be of an answer that
it wrote with few tokens. Where it is less sure, it reads the prompt again with more, at last with all. Use the file with
accelerate_vlm(model, "recipe.json", fallback=True).

With --draft-layers the command finds the layers that the model skips while it drafts for itself. The model then verifies
every drafted token with all layers, so that no answer changes. The command answers questions, and reads each answer again
without some layers: the share of tokens that are still predicted is how often drafts will be right. Layers are skipped one by
one, always the one that costs least, as long as acceptance and the measured time of a draft step promise more speed; then
held-out questions are answered with drafts and without. Answers have to be longer than a word: give --max-new-tokens. Use the
file with accelerate_vlm(model, "recipe.json", lossless=True), or --recipe recipe.json --lossless. --recipe, by default none,
is the recipe that the layers are written into; one of --fallback keeps its fallback. Of the other options --trials (sets of
layers) and --minutes count.

The exit status is 3 if no recipe keeps enough (the best trade-offs are shown) or no layers pay, if the recipe keeps less than
--keep of the held-out samples or drafts do not make them faster (a warning says so; the file is written all the same), or if
some samples could not be used.
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
EXTRA = "tune"
HELP = "find the cheapest recipe that keeps the answers to your questions"
EXAMPLES = """\
examples:
  mmaccel tune --model ./my-qwen --data questions.jsonl --keep 0.99 --goal ttft -o recipe.json
  mmaccel tune --model ./my-qwen --data questions.jsonl --keep 0.95 --confidence 0.9 --goal kv -o small-cache.json
  mmaccel tune --model ./my-qwen --data questions.jsonl --fallback --recipe divprune --keep 0.99 -o recipe.json
  mmaccel tune --model ./my-qwen --data questions.jsonl --draft-layers --max-new-tokens 128 -o drafts.json
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
            metavar="SHARE", help="Accept only recipes that reach --keep with this confidence on held-out samples."
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, metavar="N", help="Recipes or sets of layers to try, those of earlier runs included.")
    ] = 300,
    minutes: Annotated[
        float | None, typer.Option(min=0, metavar="N", help="Time for trying them.  [default: no limit]")
    ] = None,
    seconds: Annotated[
        bool, typer.Option("--measure", help="Time to first token in measured seconds, not in operations.")
    ] = False,
    fallback: Annotated[
        bool,
        typer.Option("--fallback", help="Find when --recipe should read a prompt again.  [default recipe: balanced]"),
    ] = False,
    draft_layers: Annotated[
        bool,
        typer.Option(
            "--draft-layers",
            help="Find the layers that the model skips while it drafts for itself.  [default recipe: none]",
        ),
    ] = False,
    output: Json = None,
) -> int:
    """Search, show the front, write."""
    if fallback and draft_layers:
        raise MmaccelError("Give --fallback or --draft-layers, not both.")
    if draft_layers:
        return _find_layers(context, which, asked, out, recipe, trials, minutes, output)
    if fallback:
        return _find_fallback(context, which, asked, keep, out, recipe, confidence, output)
    from ..programs.tune import report
    from ..programs.tune.tuning import tune

    json_file(output)
    task = measure.Run(asked, which, context.obj, None)
    options = {"keep": keep, "goal": goal, "out": out, "recipes": recipe or None, "confidence": confidence}
    tuned = task.call(
        "trying recipes", tune, **options, **task.answering, trials=trials, minutes=minutes, measure=seconds
    )
    if before := tuned.report["tried by earlier runs"]:
        print(f"{before} recipes are taken over from {out.with_suffix('.journal')}", file=sys.stderr)
    rows, verdict = report.rows(tuned), report.verdict(tuned, which.model)
    written = [*([out] if tuned.recipe is not None else []), out.with_suffix(".html"), out.with_suffix(".png")]
    text = f"{table(rows, range(2, len(rows[0])))}\n\n{verdict}\nwritten: {', '.join(map(str, written))}"
    tell({"verdict": verdict, "front": rows, **tuned.report}, output, lambda: text)
    enough = tuned.recipe is not None and tuned.report["recipe"]["held out keeps enough"]
    return max(task.finish(), 0 if enough else measure.PARTIAL)


def _find_fallback(
    context: typer.Context,
    which: ModelOptions,
    asked: measure.Asked,
    keep: float,
    out: Path,
    recipes: list[str] | None,
    confidence: float | None,
    output: str | None,
) -> int:
    """Find a fallback for one recipe and write both into one file."""
    recipe = _one(recipes, "--fallback", "balanced")
    from ..programs.tune.fallback import find_fallback, verdict

    json_file(output)
    task = measure.Run(asked, which, context.obj, None)
    options = {"keep": keep, "out": out, "confidence": confidence}
    found = task.call("answering", find_fallback, recipe=recipe, **options, **task.answering)
    written = f"\nwritten: {out}" if found.recipe is not None else ""
    tell({"verdict": verdict(found), **found.report}, output, lambda: verdict(found) + written)
    enough = found.recipe is not None and found.report["held out keeps enough"]
    return max(task.finish(), 0 if enough else measure.PARTIAL)


def _find_layers(
    context: typer.Context,
    which: ModelOptions,
    asked: measure.Asked,
    out: Path,
    recipes: list[str] | None,
    trials: int,
    minutes: float | None,
    output: str | None,
) -> int:
    """Find the layers that drafts skip and write them into a recipe."""
    recipe = _one(recipes, "--draft-layers", "none")
    from ..programs.tune.draft_layers import find_draft_layers, verdict

    json_file(output)
    task = measure.Run(asked, which, context.obj, None)
    options = {"recipe": recipe, "out": out, "trials": trials, "minutes": minutes}
    found = task.call("answering", find_draft_layers, **options, **task.answering)
    written = f"\nwritten: {out}" if found.recipe is not None else ""
    tell({"verdict": verdict(found), **found.report}, output, lambda: verdict(found) + written)
    faster = found.recipe is not None and found.report["held out"]["times as fast"] >= 1
    return max(task.finish(), 0 if faster else measure.PARTIAL)


def _one(recipes: list[str] | None, option: str, default: str) -> str:
    """The recipe of ``--recipe``, of which there may be one."""
    if recipes is not None and len(recipes) > 1:
        raise MmaccelError(f"{option} works on one recipe, got {', '.join(recipes)}; give one --recipe.")
    return (recipes or [default])[0]
