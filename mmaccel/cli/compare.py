"""Run several recipes at several budgets and draw accuracy against what they keep.

"25%" means different work at different sites, so the x-axis shows the visual tokens in a decoder layer, a mean over the layers,
as a share of those of the unaccelerated model; or, with --x kv, the bytes of the KV cache. Without expected answers the y-axis
shows the share of answers that equal the unaccelerated ones. Bars, and the band of the unaccelerated model, are exact 95 %
intervals (Clopper-Pearson). The unaccelerated answers are computed once for all recipes.

Results are written to --json or next to the picture, and every batch to a journal next to them. Started again, the command
resumes and does not repeat finished recipes; recipes can be added that way. It reports what it resumes and why it does not
resume the rest: a recipe whose values, code or files changed is run again, and all are if questions or pictures changed. The
figures are those of mmaccel eval.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import MmaccelError, UnsupportedError
from ..programs import plots
from .shared import measure
from .shared.options import Json, ModelOptions, Settings, budget, settings
from .shared.text import json_file, show

if TYPE_CHECKING:
    from ..programs.evaluate import Row

PLACE = 4
EXTRA = "bench"
HELP = "several recipes as curves of accuracy against what they keep"
EXAMPLES = """\
examples:
  mmaccel compare --out curves.png
  mmaccel compare --recipe none uniform divprune --retain 0.5 0.1 --suite reading --out reading.png --json reading.json
  mmaccel compare --model ./my-qwen --recipe snapkv streaming-llm --x kv --data questions.jsonl --out kv.svg
"""

RECIPES = ("none", "random", "uniform", "divprune", "vtc-cls", "fastv", "resize")
RETAIN = (0.75, 0.5, 0.25, 0.1)
_AXES = {
    "layers": ("visual_share_per_layer", "visual tokens per decoder layer, % of all"),
    "kv": ("kv_share", "KV cache at the end of the answer, % of the full one"),
}
_FORMATS = (".png", ".svg", ".pdf")


def run(
    context: typer.Context,
    which: ModelOptions,
    asked: measure.Asked,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RECIPE...",
            help=f"Recipes, methods or JSON files.  [default: {' '.join(RECIPES)}, where they work]",
        ),
    ] = None,
    retain: Annotated[
        list[float] | None,
        typer.Option(parser=budget, metavar="BUDGET...", help="Budgets of each recipe.  [default: 0.75 0.5 0.25 0.1]"),
    ] = None,
    set: Settings = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Picture to write.")] = Path("curves.png"),
    x: Annotated[Literal["layers", "kv"], typer.Option(help="What the x-axis shows.")] = "layers",
    output: Json = None,
) -> int:
    """Run, draw, print."""
    if out.suffix not in _FORMATS:
        raise MmaccelError(f"--out {str(out)!r} must end in {', '.join(_FORMATS)}.")
    if not out.absolute().parent.is_dir():
        raise MmaccelError(f"The folder {str(out.absolute().parent)!r} does not exist; make it first.")
    path = json_file(output) or out.with_suffix(".json")
    if out.is_dir() or path.resolve() in (out.resolve(), *([asked.data.resolve()] if asked.data else [])):
        raise MmaccelError(
            f"--out {str(out)!r} and --json {str(path)!r} must be two files, and neither that of --data."
        )
    rows = measure.rows(recipe or RECIPES, retain or RETAIN, settings(set))
    task = measure.Run(asked, which, context.obj, path)
    if not recipe:
        rows = _possible(task, rows)
    report = task.evaluate(rows)
    draw(report, out, x)
    show(report, output, lambda: f"{measure.render(report, by_task=False)}\n\ndrawn in {out}, figures in {path}")
    return task.finish()


def _possible(task: measure.Run, rows: list[Row]) -> list[Row]:
    """Of recipes that nobody asked for by name, those that this model can honour."""
    from ..accelerate import accelerated
    from ..media.prepare import prepare

    possible = []
    for row in rows:
        try:
            with accelerated(task.model, row.recipe, processor=prepare(task.processor, row.recipe)):
                possible.append(row)
        except UnsupportedError as error:
            if (sentence := f"{row.recipe.name} is left out: {error}") not in task.complaints:
                task.complaints.append(sentence)
    return possible


def draw(report: dict[str, Any], path: Path, axis: str = "layers") -> None:
    """The curves of a report, one a recipe, as PNG, SVG or PDF."""
    key, label = _AXES[axis]
    judged = report["rows"][0]["figures"]["accuracy"] is not None
    height = "accuracy" if judged else "loyalty"
    curves: dict[str, list[tuple[float, ...]]] = {}
    baseline, *others = report["rows"]
    for row in others:
        figures = row["figures"]
        if figures["questions"]:
            # of recipes that fail at all questions with an expected answer there is no accuracy
            share, (low, high) = figures[height] or 0.0, figures[f"{height}_interval"] or (0.0, 0.0)
            point = figures[key], share, share - low, high - share
            curves.setdefault(row["name"], []).append(tuple(100 * value for value in point))
    figure, axes = plots.load_pyplot("bench").subplots(figsize=(7.6, 4.4), layout="constrained")
    axes.axhline(100 * baseline["figures"][height], **plots.BASELINE, label="none (unaccelerated)")
    axes.axhspan(*(100 * share for share in baseline["figures"][f"{height}_interval"]), **plots.BAND)
    for number, (name, points) in enumerate(curves.items()):
        x, y, below, above = zip(*sorted(points), strict=True)
        axes.errorbar(x, y, (below, above), **plots.curve_style(number), **plots.BARS, label=name)
    plots.open_axes(
        axes, xlabel=label, ylabel="accuracy, %" if judged else "answers equal to the unaccelerated ones, %"
    )
    name, count = Path(report["settings"]["model"]).name, baseline["figures"]["questions"]
    axes.set_title(f"{name}, {count} questions", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False)
    plots.save(figure, path)
