"""Which recipe keeps the answers, and at what cost?

Asks a shipped model questions that nothing was trained or chosen on, with many recipes, and counts the answers that are kept:
those whose every token stays the most likely one when the recipe reads what the bare model wrote, so that it would write the
same. Vision towers and the bare model run once a question for all recipes, as in ``mmaccel tune``. Questions come in batches
and each batch is asked of all recipes in the order of their list; results are written after every recipe, and the same command
goes on where it was. Intervals are exact (Clopper and Pearson) at 95 %; a recipe with a budget is compared with ``divprune`` at
the same budget question by question, since both were asked the same ones (exact sign test).

Some methods are given what no model has by itself. The draft of ``speckv``, ``specprefill``, ``specpc`` and ``specvlm`` is the
model, loaded once more, which costs as much: none of the shipped ones is smaller and has as many tokens a picture.
``clip-crop`` is prepared for every question, with ``mini-clip``; it saves nothing where all pictures are scaled to one size,
and is asked of ``mini-qwen-vl`` alone. ``learned-blind`` is ``learned`` with the model's selector that reads no question.

``--show`` runs no model: table and picture anew from the JSON.

    python benchmarks/answers.py clips --questions 200 --out benchmarks/results/answers-clips.json \\
        --update docs/results/recipes.md
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from folding import folded, share
from scipy.stats import binomtest

from mmaccel import load
from mmaccel.accelerate.tuned import fingerprint
from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import put_between
from mmaccel.core.files import write_whole
from mmaccel.core.shipped_models import MODELS, located
from mmaccel.errors import MmaccelError
from mmaccel.method.selector import blind_selector_folder
from mmaccel.programs.bench import provenance
from mmaccel.programs.evaluate import Question, ask_suite, batches
from mmaccel.programs.tune.confidence import interval
from mmaccel.programs.tune.evaluate import AnsweredBatch, Goal, Measurement
from mmaccel.recipe import Recipe, Stage, get_recipe
from mmaccel.suite import DOCUMENT_TASKS, IMAGE_TASKS, VIDEO_TASKS

#: number of the first question of each task: published tables use those from 0 on, searches those of the split "val"
FIRST = 500_000
#: a box that is off by one pixel is right and not the same, and two turns say nothing that their tasks do not
PICTURES = tuple(task for task in IMAGE_TASKS if task not in ("grounding", "turns", "comparison"))

#: a model, and tasks in turn; every batch has questions with equally many pictures or frames
KINDS = {
    "clips": ("mini-qwen-vl", VIDEO_TASKS),
    "long-clips": ("mini-qwen-vl", VIDEO_TASKS),
    "pictures": ("mini-llava", PICTURES),
    "pictures-qwen": ("mini-qwen-vl", PICTURES),
    "pictures-deep": ("mini-llava-deep", PICTURES),
    "several": ("mini-llava", ("comparison",)),
    "documents": ("mini-smol", DOCUMENT_TASKS),
    "pictures-smol": ("mini-smol", PICTURES),
    "several-smol": ("mini-smol", ("comparison",)),
}
#: frames of a clip; the model was trained on clips of up to 16
FRAMES = {"clips": 16, "long-clips": 48}
#: pixels along a side of pictures and frames, where these are not 112
SIDES = {"pictures-deep": 160, "documents": 200, "pictures-smol": 200, "several-smol": 200}

#: the share of answers below which reading falls
HOLDS = 0.95

_BUDGETS = (0.25, 0.1)
_POLICIES = ("snapkv", "look-m", "infinipot-v", "vl-cache", "tova", "h2o", "streaming-llm", "keydiff")
_CODECS = ("kivi", "vidkv", "think", "fp8", "calibquant")
_BOTH = (
    "uniform",
    "divprune",
    "aim-merge",
    "random",
    "pool",
    "centerclip",
    *_POLICIES[:5],
)
_ON_CLIPS = (
    "spacetime",
    "holitom",
    "framefusion",
    "evs",
    "fastvid",
    "holitom-merge",
    "vidcom2",
    "sttm",
    "moviechat",
    "prunevid",
    "dycoke",
    "metok-merge",
    "kitoke",
    "tempme",
    "free-video-llm",
    "everest",
    "evad",
    "longvlm",
    "streamdvc",
    "streamvln",
    "stc-pruner",
    "moviechat-memory",
    "metok",
    "prunevid-merge",
    "progressive-pool",
    "vtm",
    "uniform-frames",
    "scene-frames",
    "homer",
)
#: those of one paper, without and with tokens that come back
_INSIDE = ("lazyllm-prefill", "lazyllm")
_DRAFTED = ("speckv", "specprefill", "specpc", "specvlm")
_CROPPING = ("clip-crop",)
_ON_PICTURES = (
    "tome",
    "cdpruner",
    "fastv",
    "vtc-cls",
    "dart",
    "fastervlm",
    "hiprune",
    "visiontrim",
    "visionzip",
    "attention-received",
    "fopru",
    "hired",
    "evit",
    "pitome",
    "tinychart",
    "prumerge",
    "prumerge-plus",
    "tokencorr",
    "mustdrop",
    "qg-vtc",
    "representation-shift",
    "vispruner",
    "vtm",
    "longvlm",
    "streamdvc",
    "aim",
    "vasparse",
    "vflowopt",
    "sparsevlm",
    "sparsevlm-plus",
    "pyramiddrop",
    "promptdistill",
    "gemfilter",
    "flexselect",
    "zipvl",
    "fastkv",
    "homer",
)
#: methods between vision tower and language model, inside it, and in the cache that are asked about documents
_ON_DOCUMENTS = (
    "divprune",
    "scope",
    "mmtok",
    "coverage",
    "balanced",
    "uniform",
    "random",
    "prunesid",
    "otprune",
    "visionzip",
    "vispruner",
    "hiprune",
    "holov",
    "pool",
    "tome",
    "pyramiddrop",
    "priortr",
    "apet",
    "clse",
    "hawk",
    "ivcprune",
    "fastv",
    "keydiff",
    "tova",
    "snapkv",
)
_SHOWN_AGAIN = ("divprune:0.25+memvr", "divprune:0.1+memvr")
_WEIGHED = ("spacetime", "centerclip", "kitoke", "divprune")
_TOGETHER = (
    "aim-merge:0.5+vl-cache:0.2",
    "aim-merge:0.25+vl-cache:0.4",
    "divprune:0.5+vl-cache:0.2",
    "aim-merge:0.5+vl-cache:0.2+kivi",
    "uniform:0.5+h2o:0.2",
)


def titles(kind: str) -> list[str]:
    """The rows of a table, first what says most."""
    if KINDS[kind][0] == "mini-smol":
        named = [f"{name}:{budget}" for budget in (0.25, 0.5, 0.1) for name in _ON_DOCUMENTS]
        own = [f"document:{budget}" for budget in (0.5, 0.25, 0.1)] if kind == "documents" else []
        return ["none", *own, "fp8", "think", *named, *_SHOWN_AGAIN]
    own: tuple[str, ...] = _ON_CLIPS if kind in FRAMES else (*_ON_PICTURES, *_INSIDE, *_DRAFTED)
    if kind == "pictures-qwen":
        own = (*own, *_CROPPING)
    named = [f"{name}:{budget}" for name in (*_BOTH[:3], *own[:5], *_BOTH[3:], *own[5:]) for budget in _BUDGETS]
    return [
        "none",
        *named,
        *_CODECS,
        *_TOGETHER,
        *(f"{name}:{budget}" for name in _POLICIES[5:] for budget in _BUDGETS),
        *(f"{name}:{budget}:proportional" for name in _WEIGHED for budget in _BUDGETS),
    ]


def recipe_of(title: str, folder: str = "") -> Recipe:
    """``NAME``, ``NAME:BUDGET``, the same with ``:proportional`` (attention), or several stages with ``+`` between them.

    folder : of the model that is asked.
    """
    parts = [part.partition(":") for part in title.split("+")]
    if len(parts) > 1:
        return Recipe(title, tuple(Stage(name, float(budget) if budget else None) for name, _, budget in parts))
    ((name, _, rest),) = parts
    budget, _, weighed = rest.partition(":")
    options = {"proportional": "all"} if weighed else {}
    if name == "learned-blind":
        if not (selector := blind_selector_folder(folder)):
            # without the path, since it is written into the report
            raise MmaccelError(
                f"{Path(folder).name} has no selector-blind beside its weights; run mmaccel distil --blind."
            )
        name, options = "learned", {**options, "selector": selector}
    found = get_recipe(name, **options)
    return found.override(retain=float(budget)) if budget else found


def judged(one: AnsweredBatch, recipe: Recipe, folder: str) -> Measurement:
    """A recipe on one batch of questions, for the model of ``folder``."""
    names = {stage.method for stage in recipe.stages}
    if names & {*_DRAFTED}:
        recipe = recipe.override(draft=folder)
    if not names & {*_CROPPING}:
        return one.measure(recipe)
    measured = Measurement()
    for question, prompt in one.batch:
        alone = AnsweredBatch(one.model, one.processor, [(question, prompt)], one.longest, timed=False)
        measured += alone.measure(recipe.override(query=prompt.question, clip_model=str(MODELS / "mini-clip")))
    return measured


def asked(kind: str, count: int, split: str = "test") -> list[Question]:
    """Questions of the kind's tasks in turn, so that every batch has all tasks."""
    tasks = KINDS[kind][1]
    each = -(-count // len(tasks))
    by_task = [
        ask_suite([task], each, split=split, first=FIRST, frames=FRAMES.get(kind, 16), pixels=SIDES.get(kind, 112))
        for task in tasks
    ]
    return [question for turn in zip(*by_task, strict=True) for question in turn][:count]


def run(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Ask batch by batch until all is asked or the minutes are over; ``report`` is filled and written after each recipe."""
    torch.set_num_threads(args.threads)
    folder = located(report["model"])
    model, processor = load(report["model"], device=args.device, dtype=args.dtype)
    if report.setdefault("fingerprint", fingerprint(model)) != fingerprint(model):
        raise MmaccelError(f"{args.out} was measured with another model or --dtype; give that one, or another --out.")
    if report.setdefault("split", args.split if not report["rows"] else "test") != args.split:
        raise MmaccelError(f"{args.out} is about the split {report['split']}; give another --out.")
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    rows, refused = report["rows"], report["refused"]
    done = 0
    for batch in batches(asked(args.kind, args.questions, args.split), args.batch_size):
        done += len(batch)
        one = None
        for title in args.recipes:
            known = Measurement.of(rows[title]) if title in rows else Measurement()
            if title in refused or len(known.kept) >= done:
                continue
            if end is not None and time.monotonic() > end:
                return
            one = one or AnsweredBatch(model, processor, batch, 32, timed=False)
            try:
                rows[title] = (known + judged(one, recipe_of(title, folder), folder)).as_dict()
            except MmaccelError as error:
                refused[title] = str(error)
            write(args.out, report)
            print(f"{done:5} questions  {title}", flush=True)


def write(path: Path, report: dict[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(report) + "\n", encoding="utf-8")
    beside.replace(path)


def found(report: dict[str, Any]) -> Iterator[tuple[str, Measurement]]:
    """The rows, in the order of their list."""
    for title, row in report["rows"].items():
        yield title, Measurement.of(row)


def sign_test(better: int, worse: int) -> float:
    """How likely at least so uneven a split of the questions that only one of two keeps is, if both are equally good."""
    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def against(title: str, rows: Mapping[str, Measurement]) -> str:
    """How many questions only this recipe keeps, how many only ``divprune`` at the same budget, and whether that is chance."""
    name, _, budget = title.removesuffix(":proportional").partition(":")
    base = rows.get(f"divprune:{budget}")
    if base is None or title == f"divprune:{budget}" or "+" in title:
        return ""
    both = list(zip(rows[title].kept, base.kept, strict=False))
    better, worse = sum(a and not b for a, b in both), sum(b and not a for a, b in both)
    p = sign_test(better, worse)
    return f"+{better} -{worse}, " + (f"p {p:.2g}" if p < 0.05 else "may be chance")


def table(report: dict[str, Any]) -> str:
    """One line a recipe, first those that keep most answers and of these the cheapest, and where it comes from."""
    heads = "recipe", "answers kept (95 %)", "against `divprune`", "KL"
    lines = [[*heads, "tokens a layer", "KV bytes", "computed TTFT"]]
    rows = dict(found(report))
    for title, seen in sorted(rows.items(), key=lambda row: (-row[1].agreement, row[1].share("cost"), row[0])):
        shares = [percent(seen.share(goal)) for goal in ("tokens", "kv", "ttft")]
        lines.append(
            [
                f"`{title}`",
                share(sum(seen.kept), len(seen.kept)),
                against(title, rows),
                f"{seen.divergence:.2g}",
                *shares,
            ]
        )
    said = [f"Left out: `{title}`: {why}" for title, why in report["refused"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    commands = "`, `".join(report["commands"])
    made = f"`{commands}`, {report['date']}, {report['machine']}, {versions}."
    what = f"`{report['model']}`" + (", split `val`" if report.get("split") == "val" else "")
    return folded(lines, "\n\n".join([*said, f"{what}. {made}"]))


def losses(report: dict[str, Any]) -> str:
    """The largest budget at which ``document`` loses answers, as TOML for ``mmaccel/recipe``: its whole interval is below
    :data:`HOLDS`. Beside it stands the next larger budget."""
    rows = {float(title.partition(":")[2]): seen for title, seen in found(report) if title.startswith("document:")}
    fallen = [budget for budget, seen in rows.items() if interval(sum(seen.kept), len(seen.kept))[1] < HOLDS]
    parts = [
        f"# Where `document` loses answers of {report['model']}. Made by `python benchmarks/answers.py documents --losses`."
    ]
    if fallen:
        at = max(fallen)
        told = f"document at {at:.0%} kept {rows[at].agreement:.0%} of {len(rows[at].kept)} answers of {report['model']} about "
        told += "receipts, signs, notes, tables, charts and screens"
        if more := [budget for budget in rows if budget > at]:
            told += f", and {rows[min(more)].agreement:.0%} at {min(more):.0%}: give a larger budget"
        parts.append(f'[[loss]]\nrecipe = "document"\nretain = {at}\nsentence = "{told}, or measure with mmaccel eval"')
    return "\n\n".join(parts) + "\n"


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, kept) those that nothing beats in both, from cheap to dear."""
    best, along = -1.0, []
    for cost, kept in sorted(points, key=lambda point: (point[0], -point[1])):
        if kept > best:
            best = kept
            along.append((cost, kept))
    return along


def draw(report: dict[str, Any], path: Path) -> None:
    """Answers kept over tokens a layer, bytes of cache and computed TTFT, with the front of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    goals: dict[Goal, str] = {
        "tokens": "visual tokens a layer, %",
        "kv": "bytes of the KV cache, %",
        "ttft": "operations before the first token, %",
    }
    rows = list(found(report))
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 5), sharey=True, layout="constrained")
    for axes, (goal, label) in zip(panels, goals.items(), strict=True):
        points = {title: (100 * seen.share(goal), 100 * seen.agreement) for title, seen in rows}
        low_high = [interval(sum(seen.kept), len(seen.kept)) for _, seen in rows]
        spread = [
            [point[1] - 100 * low, 100 * high - point[1]]
            for point, (low, high) in zip(points.values(), low_high, strict=True)
        ]
        across, up = zip(*points.values(), strict=True)
        bars = list(zip(*spread, strict=True))
        axes.errorbar(across, up, yerr=bars, fmt="o", color="#56B4E9", ecolor="#cccccc", markersize=4, linewidth=0.8)
        along = front(list(points.values()))
        axes.step(*zip(*along, strict=True), where="post", color="#D55E00", linewidth=1.6)
        for point in along:
            names = "\n".join(title for title, here in points.items() if here == point)
            axes.annotate(names, point, fontsize=7, va="top", xytext=(4, -4), textcoords="offset points")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("answers kept, %")
    figure.suptitle(f"{report['kind']}, {report['model']}", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, help="what the questions are about")
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="NAME[:BUDGET[:proportional]][+...]",
        help="default: the rows of the published table",
    )
    parser.add_argument("--questions", type=int, default=200, help="default: 200")
    parser.add_argument("--batch-size", type=int, default=20, help="default: 20")
    parser.add_argument("--split", choices=("test", "val"), default="test", help="val: for choosing (default: test)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="default: float32; published rows of mini-smol are in bfloat16, those of the other models in float16",
    )
    parser.add_argument("--minutes", type=float, help="stop after so many; the same command goes on")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON, written and read again; PNG beside it"
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    parser.add_argument(
        "--losses", type=Path, metavar="TOML", help="of documents: write where the recipe `document` loses answers"
    )
    parser.add_argument("--show", action="store_true", help="no model: table and picture from the JSON")
    args = parser.parse_args()
    args.recipes = args.recipes or titles(args.kind)
    report: dict[str, Any] = {"kind": args.kind, "model": KINDS[args.kind][0], "rows": {}, "refused": {}}
    if args.out.exists():
        report = json.loads(args.out.read_text(encoding="utf-8"))
        if report["kind"] != args.kind:
            raise MmaccelError(f"{args.out} is about {report['kind']}; give another --out.")
    if not args.show:
        before = report.get("versions", {})
        report |= {
            "commands": list(dict.fromkeys((*report.get("commands", ()), provenance.command("python", sys.argv[0])))),
            "date": provenance.also(report.get("date"), provenance.today()),
            "machine": f"a CPU ({provenance.processor()})"
            if args.device == "cpu"
            else provenance.processor(args.device),
            "versions": {
                name: provenance.also(before.get(name), number) for name, number in provenance.versions().items()
            },
        }
        run(args, report)
    if not report["rows"]:
        raise MmaccelError(f"{args.out} has no rows yet.")
    draw(report, args.out.with_suffix(".png"))
    text = table(report)
    if args.update:
        put_between(args.update, args.out.stem, text)
    if args.losses:
        write_whole(args.losses, losses(report).encode())
    print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MmaccelError as error:
        sys.exit(str(error))
