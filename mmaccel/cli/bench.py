"""Measure how fast a model answers, bare and accelerated in turn, from pixels to the last token.

The model is one from a folder or the hub (--model), or the architecture of one with random weights (--shape), whose speed and
memory are those of the real one. All ways of running it take turns within one process, so that ratios hold on a noisy machine;
behind "±" stands the spread of a ratio's median.

"first token" counts from uint8 pixels (a clip: from its file, if PyAV is installed) and is split into video decoding,
preparation (resize, normalise, copy to the device), vision tower with its projector, selection, the language model's
prefill, and the rest. Batches hold equal requests. "promised" is what arithmetic says: towers and prefill as much shorter as
their operations are, a decode step as much as the bytes it reads; "realised" is the share of that speed-up that came.

With --concurrency C there are C clients in a closed loop: each sends its next request when it has its answer, requests
queue, and the model takes all that wait as one batch. It answers all of them at once, so all C wait each time: the batch
formed equals C, and the clock runs through from one batch to the next. No requests arrive in between, so this is the best
case of throughput, not a study of queues.

Peak memory is what tensors held on a GPU; on a CPU it is the resident set of the whole process, where savings drown in what
Python, libraries and the C library's free pages take. "KV" is the cache at the end of the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MmaccelError
from . import ask
from .ask import retain

if TYPE_CHECKING:
    from ..programs.bench.run import Case
    from ..programs.bench.workloads import Subject
    from ..recipe import Recipe

PLACE = 5
JSON_FILE = True
HELP = "speed and memory, bare against accelerated, on real shapes and named workloads"
EXAMPLES = """\
examples:
  mmaccel bench --shape tiny
  mmaccel bench --shape llava-onevision-7b --workload video-32 video-128 --recipe divprune holitom --retain 0.25 0.1
  mmaccel bench --shape qwen2.5-vl-7b --concurrency 1 4 16 32 --answer 64 --json qwen.json --plots plots
  mmaccel bench --model ./my-llava --workload picture-336 --recipe divprune snapkv
  mmaccel bench --compare before.json after.json           exit status 1 if something got slower beyond noise
"""

#: exit status when something got slower
REGRESSION = 1
#: what the two small shapes are measured on if nothing is asked for; others take all
_QUICK = ("picture-336", "tiles-2880", "pictures-8", "video-32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mmaccel bench``."""
    parser.add_argument("--shape", metavar="NAME", help="a known architecture with random weights; 'list' shows them")
    ask.add_model_arguments(parser)
    parser.add_argument(
        "--workload", nargs="+", metavar="NAME", help="what a request shows; 'list' shows them (default: all that fit)"
    )
    parser.add_argument("--recipe", nargs="+", default=["balanced"], help="recipes, methods or JSON files")
    parser.add_argument(
        "--retain", type=retain, nargs="+", metavar="BUDGET", help="budgets of each recipe (default: its own)"
    )
    parser.add_argument("--batch", type=int, nargs="+", help="requests at a time (default: 1; 1 8 32 is usual)")
    parser.add_argument("--answer", type=int, nargs="+", default=[64], metavar="N", help="tokens (default: 64)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[], metavar="C", help="clients, see above")
    parser.add_argument("--repeats", type=int, default=5, help="warm runs of each (default: 5)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw into this folder")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two JSON files of earlier runs")


def run(options: argparse.Namespace) -> int:
    """Measure and print, or compare."""
    if options.compare:
        return _compare(options)
    from ..programs.bench.shapes import SHAPES, shape
    from ..programs.bench.workloads import WORKLOADS, workload

    if options.shape == "list" or options.workload == ["list"]:
        print("shapes: " + ", ".join(SHAPES) + "\nworkloads: " + ", ".join(WORKLOADS))
        return 0
    if options.shape and options.model:
        raise MmaccelError("Give --shape or --model, not both.")
    if options.shape:
        shape(options.shape)
    for name in options.workload or ():
        workload(name)
    sizes = [*(options.batch or ()), *options.answer, *options.concurrency, options.repeats]
    if min(sizes) < 1:
        raise MmaccelError("--batch, --answer, --concurrency and --repeats must be 1 or more.")
    path = Path(options.json) if options.json not in (None, "-") else None
    if path is not None and not path.absolute().parent.is_dir():
        raise MmaccelError(f"The folder {str(path.absolute().parent)!r} does not exist; make it first.")
    recipes = chosen(options.recipe, options.retain)
    subject = _subject(options)
    names = options.workload or (_QUICK if options.shape in (None, "tiny", "small") else tuple(WORKLOADS))
    report = measure(options, subject, _cases(options, names), recipes, path)

    from .shared import bench_report

    print(json.dumps(report, indent=2) if options.json == "-" else bench_report.render(report))
    if options.plots is not None:
        try:
            made = bench_report.draw(report, options.plots)
        except MmaccelError as error:
            # figures that took hours are not lost for want of a library
            print(f"No plots: {error}", file=sys.stderr)
        else:
            print("drawn: " + ", ".join(str(path) for path in made), file=sys.stderr)
    return 0


def chosen(names: list[str], budgets: list[float] | None) -> list[tuple[str, Recipe]]:
    """Every recipe at every budget, once, with a title; one without a budget just once."""
    from ..recipe import recipe

    found = {}
    for name in names:
        base = recipe(name)
        if not budgets or base.primary is None:
            found[base.name] = base
            continue
        for budget in budgets:
            found[f"{base.name} {budget:g}"] = base.override(retain=budget)
    return list(found.items())


def _cases(options: argparse.Namespace, names: tuple[str, ...]) -> list[Case]:
    from ..programs.bench.run import Case

    batches = options.batch or ([] if options.concurrency else [1])
    loads = [(batch, False) for batch in batches] + [(clients, True) for clients in options.concurrency]
    return [Case(name, answer, size, loop) for name in names for answer in options.answer for size, loop in loads]


def _subject(options: argparse.Namespace) -> Subject:
    import torch
    from transformers.utils import logging

    from ..programs.bench.shapes import build, shape
    from ..programs.bench.workloads import ModelSubject, ShapeSubject

    logging.set_verbosity_error()
    if not options.shape:
        return ModelSubject(*ask.load_model(options))
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = "float32" if device.type == "cpu" else "bfloat16"
    model = build(options.shape, device, getattr(torch, kind if options.dtype == "auto" else options.dtype))
    if options.attn:
        model.set_attn_implementation(options.attn)
    return ShapeSubject(model, shape(options.shape))


def measure(
    options: argparse.Namespace,
    subject: Subject,
    cases: list[Case],
    recipes: list[tuple[str, Recipe]],
    path: Path | None,
) -> dict[str, Any]:
    """The report; it is written to ``path`` after every case."""
    import torch

    from ..programs.bench import origin
    from ..programs.bench.run import Bench
    from ..programs.bench.shapes import count_parameters

    model = subject.model
    report: dict[str, Any] = {
        "command": origin.command("mmaccel", arguments=options.argv),
        "date": origin.today(),
        "machine": {
            "processor": origin.processor(str(model.device)),
            "threads": torch.get_num_threads(),
            "memory": "tensors on the GPU" if model.device.type == "cuda" else "resident set of the process",
        },
        "versions": origin.versions(),
        "model": {
            "name": options.shape or Path(options.model or ask.shipped().name).name,
            "shape": options.shape,
            "parameters": count_parameters(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
        },
        "repeats": options.repeats,
        "rows": [],
    }
    bench = Bench(subject, options.repeats, tell=lambda text: print(text, file=sys.stderr, flush=True))
    for case in cases:
        report["rows"] += bench.measure(case, recipes)
        if path is not None:
            draft = path.with_name(path.name + ".part")
            draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, path)
    return report


def _compare(options: argparse.Namespace) -> int:
    from .shared import bench_report

    try:
        text, regressions = bench_report.compare(*map(_read, options.compare))
    except (KeyError, TypeError, AttributeError) as error:
        names = " or ".join(repr(str(path)) for path in options.compare)
        raise MmaccelError(f"{names} lacks what mmaccel bench writes ({error}); make them with --json FILE.") from error
    print(text)
    return REGRESSION if regressions else 0


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = [(row["workload"], row["recipe"], row["problem"]) for row in found["rows"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MmaccelError(f"{str(path)!r} holds no results of mmaccel bench; make them with --json FILE.") from error
    return found
