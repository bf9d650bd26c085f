"""Does a searched recipe keep more answers than every fixed one at the same cost?

Searches a recipe for a shipped model with ``mmaccel.tune`` on questions of the split ``val``, then asks it, and every recipe
of the registry with one budget (or of ``--recipes``, for a model that takes long), questions that nothing was trained, searched
or chosen on. Each fixed recipe gets the budget at which as many visual tokens are in a decoder layer, mean over the layers, as
with the searched one, or the next more where a picture has too few tokens for that; what cannot be had at that cost is left
out. All are asked the same questions, and compared one by one with an exact sign test. Results are written after every recipe,
and the same command goes on where it was; ``--show`` makes the table from the JSON.

    python benchmarks/tuned.py pictures --keep 0.95 --questions 120 --out benchmarks/results/tuned-pictures.json \\
        --update docs/results/tuned.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from answers import FRAMES, KINDS, SIDES, asked, sign_test, write
from folding import folded, share

from mmaccel import load
from mmaccel.accelerate.tuned import fingerprint
from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import put_between
from mmaccel.errors import MmaccelError
from mmaccel.programs.bench import provenance
from mmaccel.programs.evaluate import Question, ask_suite, batches
from mmaccel.programs.tune.baselines import at_equal_cost
from mmaccel.programs.tune.evaluate import AnsweredBatch, Measurement
from mmaccel.programs.tune.tuning import tune
from mmaccel.recipe import Recipe, get_recipe, recipes

#: rows of the table; the others are counted
_SHOWN = 12


def questions(kind: str, count: int) -> list[Question]:
    """What is searched with: the kind's tasks in turn."""
    tasks = KINDS[kind][1]
    each, frames, pixels = -(-count // len(tasks)), FRAMES.get(kind, 16), SIDES.get(kind, 112)
    by_task = [ask_suite([task], each, split="val", frames=frames, pixels=pixels) for task in tasks]
    return [question for turn in zip(*by_task, strict=True) for question in turn][:count]


def run(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Search, then ask; ``report`` is filled and written after each recipe."""
    torch.set_num_threads(args.threads)
    model, processor = load(report["model"], device="cpu", dtype=args.dtype)
    if report.setdefault("fingerprint", fingerprint(model)) != fingerprint(model):
        raise MmaccelError(f"{args.out} was measured with another model; give another --out.")
    if "recipe" not in report:
        made = tune(
            model,
            processor,
            questions(args.kind, args.samples),
            keep=args.keep,
            goal="tokens",
            recipes=args.recipes,
            trials=args.trials,
            out=args.out.with_suffix(".recipe.json"),
            progress=lambda what, done, of: print(f"\r{what} {done}/{of}", end="", flush=True),
        )
        if made.recipe is None:
            raise MmaccelError(f"No recipe keeps {args.keep:.0%} of the answers; give a smaller --keep.")
        report["recipe"] = made.recipe.to_json()
        write(args.out, report)
    answered = [
        AnsweredBatch(model, processor, batch, 32, timed=False)
        for batch in batches(asked(args.kind, args.questions), args.batch_size)
    ]
    ask(report, "tuned", get_recipe(Recipe.from_json(report["recipe"])), answered, args.out)
    cost = Measurement.of(report["rows"]["tuned"]).share("tokens")
    for name in args.recipes or recipes():
        fixed = get_recipe(name)
        if fixed.primary is None or name in report["rows"] or name in report["refused"]:
            continue
        try:
            same = at_equal_cost(answered[0].measure, fixed, "tokens", cost, over=True)
            if same is None:
                report["refused"][name] = "cannot be had at this cost"
            else:
                ask(report, name, same[0], answered, args.out)
        except MmaccelError as error:
            report["refused"][name] = str(error)


def ask(report: dict[str, Any], name: str, recipe: Recipe, answered: list[AnsweredBatch], out: Path) -> None:
    """One row."""
    if name in report["rows"]:
        return
    report["rows"][name] = sum((one.measure(recipe) for one in answered), Measurement()).as_dict()
    write(out, report)
    print(f"{name}: {percent(Measurement.of(report['rows'][name]).agreement)}", flush=True)


def table(report: dict[str, Any]) -> str:
    """The searched recipe, and the fixed ones that come nearest to it."""
    rows = {name: Measurement.of(row) for name, row in report["rows"].items()}
    tuned = rows.pop("tuned")
    lines = [["recipe", "answers kept (95 %)", "tokens a layer", "only the searched one keeps, only this one"]]

    def line(name: str, seen: Measurement, beside: str) -> list[str]:
        return [name, share(sum(seen.kept), len(seen.kept)), percent(seen.share("tokens")), beside]

    found = Recipe.from_json(report["recipe"])
    parts = [f"`{told(stage)}`" for stage in found.stages]
    weights = "" if found.proportional == "none" else f', `proportional="{found.proportional}"`'
    lines.append(line("searched: " + " + ".join(parts) + weights, tuned, ""))
    best = sorted(rows.items(), key=lambda row: (-row[1].agreement, row[0]))
    for name, seen in best[:_SHOWN]:
        pairs = list(zip(tuned.kept, seen.kept, strict=True))
        more, fewer = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
        p = sign_test(more, fewer)
        lines.append(line(f"`{name}`", seen, f"{more}, {fewer}: " + (f"p {p:.2g}" if p < 0.05 else "may be chance")))
    others = (
        f"{max(0, len(best) - _SHOWN)} other recipes kept fewer; {len(report['refused'])} cannot be had at this cost"
    )
    others += "." if report.get("recipes") else ", policies and codecs of the cache among them."
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    made = f"`{report['command']}`, {report['date']}, {report['machine']}, {versions}."
    return folded(lines, f"{len(tuned.kept)} questions, `{report['model']}`; {others} {made}")


def told(stage: Any) -> str:
    """A stage as it is written in a recipe."""
    options = "".join(f", {name}={value}" for name, value in stage.options.items())
    return stage.method + ("" if stage.retain is None else f":{stage.retain:g}") + options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, help="what the questions are about")
    parser.add_argument("--keep", type=float, default=0.95, help="share of the answers (default: 0.95)")
    parser.add_argument("--samples", type=int, default=100, help="to search with (default: 100)")
    parser.add_argument("--trials", type=int, default=300, help="recipes to try (default: 300)")
    parser.add_argument("--questions", type=int, default=120, help="to compare with (default: 120)")
    parser.add_argument("--recipes", nargs="+", help="to search among and to compare with (default: all)")
    parser.add_argument("--dtype", default="auto", help="of the model (default: auto, on a CPU float32)")
    parser.add_argument("--batch-size", type=int, default=20, help="default: 20")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON, written and read again")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    parser.add_argument("--show", action="store_true", help="no model: the table from the JSON")
    args = parser.parse_args()
    report: dict[str, Any] = {"kind": args.kind, "model": KINDS[args.kind][0], "rows": {}, "refused": {}}
    if args.out.exists():
        report = json.loads(args.out.read_text(encoding="utf-8"))
        if report["kind"] != args.kind:
            raise MmaccelError(f"{args.out} is about {report['kind']}; give another --out.")
    if not args.show:
        report |= {
            "command": provenance.command("python", sys.argv[0]),
            "date": provenance.today(),
            "machine": f"a CPU ({provenance.processor()})",
            "versions": provenance.versions(),
            "recipes": args.recipes,
        }
        run(args, report)
        write(args.out, report)
    text = table(report)
    if args.update:
        put_between(args.update, args.out.stem, text)
    print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MmaccelError as error:
        sys.exit(str(error))
