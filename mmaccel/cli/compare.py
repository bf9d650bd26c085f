"""Run several recipes at several budgets and draw accuracy against what they keep.

"25%" means different work at different sites, so the curves stand over the visual tokens in a decoder layer, a mean over the
layers, as a share of what the unaccelerated model holds there; or, with --x kv, over the bytes of the KV cache. Without
expected answers the share of answers that equal the unaccelerated ones is drawn. The unaccelerated answers are computed once
for all recipes.

Results are written while it runs, to --json or beside the picture. Started again with the same settings, it goes on where it
was, and what is finished is not run again; a recipe can be added that way. The figures are those of mmaccel eval.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MmaccelError, UnsupportedError
from .ask import retain
from .shared import measure

if TYPE_CHECKING:
    from ..programs.evaluate import Row

PLACE = 4
JSON_FILE = True
HELP = "several recipes as curves of accuracy against what they keep"
EXAMPLES = """\
examples:
  mmaccel compare --out curves.png
  mmaccel compare --recipes none uniform divprune --retain 0.5 0.1 --suite reading --out reading.png --json reading.json
  mmaccel compare --model ./my-qwen --recipes snapkv streaming-llm --x kv --data questions.jsonl --out kv.svg
"""

RECIPES = ("none", "random", "uniform", "divprune", "vtc-cls", "fastv", "resize")
RETAIN = (0.75, 0.5, 0.25, 0.1)
#: Okabe and Ito's colours, dark ones first; with the markers and dashes they remain apart in grey
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*<>"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
_AXES = {
    "layers": ("visual_share_per_layer", "visual tokens per decoder layer, % of all"),
    "kv": ("kv_share", "KV cache at the end of the answer, % of the full one"),
}
_FORMATS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mmaccel compare``."""
    parser.add_argument(
        "--recipes", nargs="+", metavar="RECIPE", help=f"recipes, methods or JSON files (default: {' '.join(RECIPES)})"
    )
    parser.add_argument(
        "--retain",
        type=retain,
        nargs="+",
        metavar="BUDGET",
        default=RETAIN,
        help="budgets (default: 0.75 0.5 0.25 0.1)",
    )
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="picture to write (default: curves.png)")
    parser.add_argument(
        "--x", choices=tuple(_AXES), default="layers", help="what the curves stand over (default: layers)"
    )
    measure.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run, draw, print."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MmaccelError("Drawing needs matplotlib; run: pip install 'mmaccel[bench]'.") from None
    if options.out.suffix not in _FORMATS:
        raise MmaccelError(f"--out {str(options.out)!r} must end in {', '.join(_FORMATS)}.")
    if not options.out.absolute().parent.is_dir():
        raise MmaccelError(f"The folder {str(options.out.absolute().parent)!r} does not exist; make it first.")
    rows = _rows(options.recipes or RECIPES, options.retain)
    path = options.out.with_suffix(".json") if options.json in (None, "-") else Path(options.json)
    task = measure.Run(options, path)
    if options.recipes is None:
        rows = _possible(task, rows)
    report = task.evaluate(rows)
    draw(report, options.out, options.x)
    print(json.dumps(report, indent=2) if options.json == "-" else measure.render(report, by_task=False))
    if options.json != "-":
        print(f"\ndrawn in {options.out}, figures in {path}")
    return task.finish()


def _rows(recipes: list[str] | tuple[str, ...], budgets: list[float] | tuple[float, ...]) -> list[Row]:
    """Recipe ``none`` first, as the line to compare with, then every recipe at every budget, each once."""
    from ..programs.evaluate import Row

    rows = [Row("none")]
    for name in recipes:
        rows += [Row(name, budget) for budget in budgets] if Row(name).recipe.primary is not None else [Row(name)]
    return list({row.title: row for row in rows}.values())


def _possible(task: measure.Run, rows: list[Row]) -> list[Row]:
    """Of recipes that nobody asked for by name, those that this model can honour."""
    from ..accelerate import accelerated
    from ..media.prepare import prepare

    found = []
    for row in rows:
        try:
            with accelerated(task.model, row.recipe, processor=prepare(task.processor, row.recipe)):
                found.append(row)
        except UnsupportedError as error:
            if (sentence := f"{row.recipe.name} is left out: {error}") not in task.complaints:
                task.complaints.append(sentence)
    return found


def draw(report: dict[str, Any], path: Path, axis: str = "layers") -> None:
    """The curves of a report, one a recipe, as PNG, SVG or PDF."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    key, label = _AXES[axis]
    judged = report["rows"][0]["figures"]["accuracy"] is not None
    height = "accuracy" if judged else "loyalty"
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        figures = row["figures"]
        curves.setdefault(row["recipe"]["name"], []).append((100 * figures[key], 100 * figures[height]))
    figure, axes = pyplot.subplots(figsize=(7.6, 4.4), layout="constrained")
    (_, level), *_ = curves.pop("none")
    axes.axhline(level, color="black", linewidth=1, linestyle=(0, (1, 2)), label="none (unaccelerated)")
    for number, (name, points) in enumerate(curves.items()):
        across, up = zip(*sorted(points), strict=True)
        axes.plot(
            across,
            up,
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=_DASHES[number % len(_DASHES)],
            markersize=6,
            linewidth=1.6,
            label=name,
        )
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy, %" if judged else "answers equal to the unaccelerated ones, %")
    settings = report["settings"]
    axes.set_title(
        f"{Path(settings['model']).name}, {report['rows'][0]['figures']['questions']} questions", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise MmaccelError(f"Cannot write {str(path)!r}: {error.strerror}.") from error
    finally:
        pyplot.close(figure)
